//! What can go wrong, by fault: the caller's wish, or the system, with the operation that failed.

use std::io;
use std::time::Duration;

use crate::Invalid;

/// Why steering could not be changed or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The wish contradicts itself.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// No program of that name in the system's directories.
    #[error(
        "{0} is not installed (looked in /usr/sbin, /sbin, /usr/bin, /bin); install the package iptables"
    )]
    NotInstalled(String),
    /// A program did not come to its end in this time.
    #[error(
        "{} did not end within {} s; does another program hold the lock of iptables \
         (/run/xtables.lock)?",
        .0,
        .1.as_secs()
    )]
    TimedOut(String, Duration),
    /// A program could not be run. No `source`: the message has it, and who prints the chain would say it twice.
    #[error("cannot run {0}: {1}")]
    Run(String, io::Error),
    /// A program refused.
    #[error("{command} failed{}: {stderr}", at(.line))]
    Command {
        /// The program and its arguments.
        command: String,
        /// The line of its input that it complained about.
        line: Option<String>,
        /// What it said.
        stderr: String,
    },
    /// iptables does not take what a rule matches.
    #[error("iptables refuses it: {0}")]
    Refused(String),
    /// No variant of iptables works here.
    #[error("iptables cannot be used: {0}")]
    NoIptables(String),
    /// iptables took a chain and shows it with another number of rules.
    #[error("chain {chain} was written with {written} rules, but {found} are there")]
    NotTaken {
        /// The chain.
        chain: String,
        /// Rules written.
        written: usize,
        /// Rules read back.
        found: usize,
    },
    /// Steps succeed, and are undone at once by somebody else.
    #[error("another program keeps undoing: {0}")]
    Undone(String),
    /// There is no nf_tables, and so nothing that stands when others flush the firewall.
    #[error("this kernel has no nftables")]
    NoNftables,
    /// The kernel refused what was asked for over netlink, or a netlink socket failed.
    #[error("{0}: {1}")]
    Netlink(String, io::Error),
}

fn at(line: &Option<String>) -> String {
    line.as_ref()
        .map(|line| format!(" at `{line}`"))
        .unwrap_or_default()
}

impl Error {
    pub(crate) fn netlink(operation: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let operation = operation.into();
        move |error| Error::Netlink(operation, error)
    }

    /// The error number of the system, if it gave one.
    pub fn os_error(&self) -> Option<i32> {
        match self {
            Error::Run(_, error) | Error::Netlink(_, error) => error.raw_os_error(),
            _ => None,
        }
    }
}
