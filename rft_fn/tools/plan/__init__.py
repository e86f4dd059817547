"""What a run will cost: its steps simulated from rates, before anything is rented."""
