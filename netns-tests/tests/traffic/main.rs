//! Behaviour of `dibsd` and `dibsctl` on real traffic, a module for each subject. One binary: it is linked
//! once, and while a test waits there is another to run.

mod accept;
mod attacks;
mod backstop;
mod broken;
mod bumps;
mod config;
mod crash;
mod device;
mod disagreement;
mod experiment;
mod gateway;
mod hostile;
mod hosts;
mod init;
mod joins;
mod late;
mod links;
mod locked;
mod many;
mod members;
mod orphans;
mod others;
mod policy;
mod prefer;
mod recovery;
mod require;
mod reuse;
mod rules;
mod saving;
mod schedulers;
mod start;
mod switching;
mod told;
mod transfer;
mod turns;
