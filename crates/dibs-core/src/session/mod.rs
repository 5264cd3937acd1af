//! The session with a peer: handshake, keys, replay windows, rekey.
