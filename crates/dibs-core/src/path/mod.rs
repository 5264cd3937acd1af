//! One path: packet numbers, acknowledgements, loss detection, congestion control, MTU.
