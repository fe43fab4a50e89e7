"""Weight formats on a device: conversion at load, dequantisation, dummy weights."""
