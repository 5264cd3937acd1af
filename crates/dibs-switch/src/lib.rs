//! What the daemons of two hosts agree on: choices for single connections, and the messages about
//! them. Pure, so that the simulator runs the same as the daemon does.

pub mod answering;
pub mod asking;
pub mod conns;
pub mod engine;
pub mod knock;
pub mod locks;
pub mod marks;
pub mod matching;
pub mod messages;
pub mod naming;
pub mod phase;
pub mod place;
pub mod plausible;
pub mod rules;
pub mod shadow;
pub mod silence;
pub mod table;
pub mod telling;
pub mod tracked;
