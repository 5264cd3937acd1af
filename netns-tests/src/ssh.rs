//! A session of ssh, in which keys are pressed.

use std::fs::{File, OpenOptions};
use std::io::Write as _;

use anyhow::{Context as _, Result};
use dibs_netns::{HANG, Host, Process};

/// Makes one key, for the server and its only user. No password of root is needed, but a locked one would keep root out.
const SERVE: &str = "mkdir /run/sshd\n\
    ssh-keygen -q -t ed25519 -N '' -f /run/key\n\
    sed 's/^root:[^:]*/root:*/' /etc/shadow >/run/shadow\n\
    mount --bind /run/shadow /etc/shadow\n\
    exec /usr/sbin/sshd -D -e -f /dev/null -h /run/key -o UsePAM=no -o PidFile=none \
     -o PermitRootLogin=yes -o StrictModes=no -o AuthorizedKeysFile=/run/key.pub";
/// Logs in at `$0`, and has each line echoed. The pipe stays open as long as this shell holds it for both directions.
const CALL: &str = "mkfifo /run/keys\n\
    exec ssh -F none -i /run/key -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
     \"root@$0\" 'echo welcome; exec cat' <>/run/keys";

/// A session of OpenSSH, and its server.
#[derive(Debug)]
pub struct Session {
    client: Process,
    keys: File,
    pressed: usize,
    _server: Process,
}

impl Session {
    /// Logs in from a host at an address of another.
    ///
    /// # Errors
    /// If either program does not start, or refuses.
    pub fn start(from: &Host, to: &Host, address: &str) -> Result<Self> {
        let mut serve = to.command("sh");
        serve.args(["-ec", SERVE]);
        let mut server = to.spawn(serve)?;
        server.wait_for_output("Server listening on 0.0.0.0", HANG)?;
        let [theirs, ours] = [to, from].map(|host| host.run_dir().join("key"));
        std::fs::copy(theirs, ours).context("the key")?;
        let mut call = from.command("sh");
        call.args(["-ec", CALL, address]);
        let mut client = from.spawn(call)?;
        client.wait_for_output("welcome", HANG)?;
        let keys = from.run_dir().join("keys");
        Ok(Self {
            client,
            keys: OpenOptions::new().write(true).open(keys).context("keys")?,
            pressed: 0,
            _server: server,
        })
    }

    /// Presses a key.
    ///
    /// # Errors
    /// If the client has ended.
    pub fn press(&mut self) -> Result<()> {
        self.pressed += 1;
        writeln!(self.keys, "key {}.", self.pressed).context("ssh ended")
    }

    /// Waits for the echo of the last key.
    ///
    /// # Errors
    /// If there is none.
    pub fn echoes(&mut self) -> Result<()> {
        let last = format!("key {}.", self.pressed);
        self.client.wait_for_output(&last, HANG)
    }
}
