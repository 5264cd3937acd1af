//! Members of the daemon's group: users who may use the control socket, and are not root.

use std::fs::Permissions;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{Host, Process};
use nix::unistd::Uid;
use serde_json::Value;

use crate::daemon::{Node, SOON};
use crate::{programs, traffic};

/// Starts `$0` as the user `$1` with the other arguments, wherever it lies: by its descriptor, for the directory
/// may be root's alone.
const AS_USER: &str = "uid=$1; shift; exec 9<\"$0\"; \
     exec setpriv --reuid=\"$uid\" --regid=0 --clear-groups /proc/self/fd/9 \"$@\"";
/// The same without end.
const AGAIN_AND_AGAIN: &str = "uid=$1; shift; exec 9<\"$0\"; \
     exec setpriv --reuid=\"$uid\" --regid=0 --clear-groups \
     sh -c 'while :; do /proc/self/fd/9 \"$@\"; done' again \"$@\"";

/// A user of a host, in the group of its control socket.
#[derive(Debug)]
pub struct Member<'a> {
    node: &'a Node,
    uid: u32,
}

impl Node {
    /// The user of that number, who may use the control socket from now on.
    ///
    /// # Errors
    /// If the system does not let us.
    pub fn member(&self, uid: u32) -> Result<Member<'_>> {
        std::fs::set_permissions(self.directory(), Permissions::from_mode(0o750))
            .context("directory of the daemon")?;
        Ok(Member { node: self, uid })
    }
}

impl Member<'_> {
    /// Answer of a command of `dibsctl --json`.
    ///
    /// # Errors
    /// If it fails; with what it said.
    pub fn ctl(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.dibsctl(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let (line, status) = (arguments.join(" "), output.status);
        ensure!(status.success(), "dibsctl {line}: {status}: {said}");
        serde_json::from_slice(&output.stdout).with_context(|| format!("dibsctl {line}"))
    }

    /// Words of a command that must be refused, on standard error.
    ///
    /// # Errors
    /// If it does anything but exit with 1.
    pub fn refused(&self, arguments: &[&str]) -> Result<String> {
        let output = self.dibsctl(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let (line, status) = (arguments.join(" "), output.status);
        ensure!(status.code() == Some(1), "dibsctl {line}: {status}: {said}");
        Ok(said)
    }

    /// Follows the daemon's events from now on; they are on standard output.
    ///
    /// # Errors
    /// If that does not begin.
    pub fn events(&self) -> Result<Process> {
        self.node.host.spawn(self.command(AS_USER, &["events"]))
    }

    /// Asks the same again and again.
    ///
    /// # Errors
    /// If that does not begin.
    pub fn again_and_again(&self, arguments: &[&str]) -> Result<Process> {
        let command = self.command(AGAIN_AND_AGAIN, arguments);
        self.node.host.spawn(command)
    }

    /// Both ends of a new connection to another host.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn connect(&self, to: &Host, server: SocketAddr) -> Result<(TcpStream, TcpStream)> {
        let uid = Uid::from_raw(self.uid);
        traffic::connect_as(uid, 0, &self.node.host, to, server)
    }

    fn dibsctl(&self, arguments: &[&str]) -> Result<Output> {
        let command = self.command(AS_USER, arguments);
        self.node.host.spawn(command)?.output(SOON)
    }

    fn command(&self, script: &str, arguments: &[&str]) -> Command {
        let mut command = self.node.host.command("sh");
        command.args(["-c", script]);
        command.arg(programs::built("dibsctl"));
        command.arg(self.uid.to_string());
        command.arg("--json").args(arguments);
        command
    }
}
