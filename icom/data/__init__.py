"""What a training sample is made of: pictures, captions, latents, and the stream that deals them out."""
