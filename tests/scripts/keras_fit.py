"""Keras on torch: its optimizers are not torch's."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy

model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
model.fit(numpy.ones((16, 8), "float32"), numpy.ones((16, 1), "float32"), batch_size=8, epochs=2, verbose=0)
print("trained")
