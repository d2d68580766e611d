"""What verl imports: reward functions, the hook that registers our model class, and checks of a launch before it starts."""
