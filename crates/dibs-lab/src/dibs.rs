//! dibsd on hosts of the lab, and dibsctl to steer it: the real programs with real configurations.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
pub use dibs_control::Trust;
use dibs_control::{PathInfo, PathState, PeerInfo, PeerState, Status};
use dibs_netns::{HANG, Host, Process, wait_for};
use serde::de::DeserializeOwned;

/// The daemon's UDP port, on all paths.
pub const PORT: u16 = 5300;
/// Where TUNs come from.
const TUN: &str = "/dev/net/tun";
/// Where programs are installed.
const DIRECTORIES: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// The programs of dibs.
#[derive(Clone, Debug)]
pub struct Programs {
    dibsd: PathBuf,
    dibsctl: PathBuf,
}

/// A path between two hosts.
#[derive(Clone, Debug)]
pub struct PathSpec {
    /// In the configuration.
    pub name: &'static str,
    /// The same at both ends.
    pub interface: &'static str,
    /// At both ends.
    pub trust: Trust,
    /// The hosts' addresses.
    pub ends: [IpAddr; 2],
}

/// What one host's configuration has beside its key, paths and peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings<'a> {
    /// Further lines of `[daemon]`.
    pub daemon: &'a str,
    /// Further tables, such as `[[rule]]`.
    pub tables: &'a str,
}

/// A running dibsd, killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    host: Host,
    dibsctl: PathBuf,
    process: Process,
}

impl Programs {
    /// Those beside the running program, or else those that are installed.
    ///
    /// # Errors
    /// If one is missing.
    pub fn find() -> Result<Self> {
        let own = std::env::current_exe().context("the running program's place")?;
        Self::beside(own.parent().unwrap_or(Path::new("/")))
    }

    /// Those of a directory, or else those that are installed.
    ///
    /// # Errors
    /// If one is missing.
    pub fn beside(directory: &Path) -> Result<Self> {
        let beside = directory;
        let find = |name: &str| {
            let installed = DIRECTORIES.iter().map(Path::new);
            let mut candidates = std::iter::once(beside).chain(installed);
            candidates
                .find_map(|directory| {
                    let program = directory.join(name);
                    program.is_file().then_some(program)
                })
                .with_context(|| {
                    let beside = beside.display();
                    format!("{name} is neither in {beside} nor installed")
                })
        };
        Ok(Self {
            dibsd: find("dibsd")?,
            dibsctl: find("dibsctl")?,
        })
    }

    /// A new key pair, in base64. What it protects is a demonstration.
    fn keys(&self) -> Result<[String; 2]> {
        let private = self.print("genkey", "")?;
        let public = self.print("pubkey", &private)?;
        Ok([private, public])
    }

    /// What a command of dibsctl that needs no daemon makes of its input.
    fn print(&self, command: &str, input: &str) -> Result<String> {
        let mut child = Command::new(&self.dibsctl)
            .arg(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start: {}", self.dibsctl.display()))?;
        let mut stdin = child.stdin.take().expect("it is piped");
        let written = stdin.write_all(input.as_bytes());
        drop(stdin);
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "dibsctl {command} failed");
        written.with_context(|| format!("dibsctl {command} does not read"))?;
        let text = String::from_utf8(output.stdout).context("a key in base64")?;
        Ok(text.trim().to_owned())
    }

    /// Starts dibsd on two hosts, each with its settings, and returns once they agree on keys and
    /// all paths carry data.
    ///
    /// # Errors
    /// If this user may make no TUN, a daemon ends or the two do not get along; with what they printed.
    pub fn join(
        &self,
        hosts: [&Host; 2],
        paths: &[PathSpec],
        settings: [Settings<'_>; 2],
    ) -> Result<[Daemon; 2]> {
        let tun = OpenOptions::new().read(true).write(true).open(TUN);
        tun.with_context(|| format!("{TUN}, which dibsd needs, and which usually is open to all"))?;
        let keys = [self.keys()?, self.keys()?];
        let start = |near: usize| {
            let far = 1 - near;
            let peer = Peer {
                name: hosts[far].name(),
                public_key: &keys[far][1],
                end: far,
            };
            self.start(hosts[near], &keys[near][0], &peer, paths, settings[near])
        };
        let mut daemons = [start(0)?, start(1)?];
        for daemon in &mut daemons {
            daemon.wait_until_joined(paths.len())?;
        }
        Ok(daemons)
    }

    fn start(
        &self,
        host: &Host,
        private_key: &str,
        peer: &Peer<'_>,
        paths: &[PathSpec],
        settings: Settings<'_>,
    ) -> Result<Daemon> {
        let directory = host.run_dir().join("dibs");
        let write = |name: &str, content: &str| {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(directory.join(name))?;
            file.write_all(content.as_bytes())
        };
        std::fs::create_dir(&directory)
            .and_then(|()| write("private.key", private_key))
            .and_then(|()| write("dibsd.toml", &configuration(peer, paths, settings)))
            .with_context(|| directory.display().to_string())?;
        let mut command = host.command(&self.dibsd);
        command.args(["--config", "/run/dibs/dibsd.toml"]);
        Ok(Daemon {
            host: host.clone(),
            dibsctl: self.dibsctl.clone(),
            process: host.spawn(command)?,
        })
    }
}

/// The far end, as a configuration names it.
struct Peer<'a> {
    name: &'a str,
    public_key: &'a str,
    /// Its place among the ends of each path.
    end: usize,
}

fn configuration(peer: &Peer<'_>, paths: &[PathSpec], settings: Settings<'_>) -> String {
    let Settings { daemon, tables } = settings;
    let mut text = format!(
        "[daemon]\n\
         private_key_file = \"/run/dibs/private.key\"\n\
         control_socket = \"/run/dibs/dibsd.sock\"\n\
         port = {PORT}\n\
         {daemon}\n"
    );
    let mut addresses = Vec::new();
    let mut endpoints = String::new();
    for path in paths {
        let trust = match path.trust {
            Trust::Trusted => "trusted",
            Trust::Untrusted => "untrusted",
        };
        let (name, interface, far) = (path.name, path.interface, path.ends[peer.end]);
        let prefix = if far.is_ipv4() { 32 } else { 128 };
        addresses.push(format!("\"{far}/{prefix}\""));
        let endpoint = SocketAddr::new(far, PORT);
        writeln!(endpoints, "{name} = \"{endpoint}\"").expect("a string takes it");
        write!(
            text,
            "[[path]]\nname = \"{name}\"\ninterface = \"{interface}\"\ntrust = \"{trust}\"\n"
        )
        .expect("a string takes it");
    }
    let (name, key, addresses) = (peer.name, peer.public_key, addresses.join(", "));
    text + &format!(
        "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\naddresses = [{addresses}]\n\
         [peer.endpoints]\n{endpoints}{tables}"
    )
}

impl Daemon {
    /// Runs dibsctl on the daemon's host and returns what it says in JSON.
    ///
    /// # Errors
    /// If it refuses or fails; with its sentence.
    pub fn ctl<T: DeserializeOwned>(&self, words: &[&str]) -> Result<T> {
        let mut command = self.host.command(&self.dibsctl);
        command.arg("--json").args(words);
        let output = self.host.spawn(command)?.output(HANG)?;
        let line = words.join(" ");
        if !output.status.success() {
            let sentence = String::from_utf8_lossy(&output.stderr);
            let sentence = sentence.trim().trim_start_matches("dibsctl: ");
            bail!("dibsctl {line} on {}: {sentence}", self.host.name());
        }
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("what dibsctl {line} printed"))
    }

    /// The process that runs dibsd.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// `dibsctl status`
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl).
    pub fn status(&self) -> Result<Status> {
        self.ctl(&["status"])
    }

    /// `dibsctl path list`
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl).
    pub fn paths(&self) -> Result<Vec<PathInfo>> {
        self.ctl(&["path", "list"])
    }

    /// Waits until the session stands and that many paths are up.
    fn wait_until_joined(&mut self, paths: usize) -> Result<()> {
        let mut last = None;
        let joined = wait_for(HANG, "dibsd's session and paths", || {
            if !self.process.is_running() {
                return Some(Err(anyhow::anyhow!("dibsd ended")));
            }
            match self.is_joined(paths) {
                Ok(true) => Some(Ok(())),
                Ok(false) => None,
                Err(error) => {
                    last = Some(error);
                    None
                }
            }
        });
        let printed = || format!("dibsd on {}:\n{}", self.host.name(), self.process.stderr());
        match (joined, last) {
            (Ok(result), _) => result,
            (Err(_), Some(last)) => Err(last),
            (Err(waited), None) => Err(waited),
        }
        .with_context(printed)
    }

    fn is_joined(&self, paths: usize) -> Result<bool> {
        let peers: Vec<PeerInfo> = self.ctl(&["peer", "list"])?;
        let up = |path: &PathInfo| path.state == PathState::Up;
        Ok(peers
            .iter()
            .all(|peer| peer.state == PeerState::Established)
            && self.paths()?.iter().filter(|path| up(path)).count() == paths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::Site;

    #[test]
    fn the_configuration_is_one() {
        let key = dibs_config::PrivateKey::generate().public().to_string();
        let peer = Peer {
            name: "server",
            public_key: &key,
            end: 1,
        };
        let settings = Settings {
            daemon: "integrity = \"off\"",
            tables: "[[rule]]\nbump = \"scramble\"\ndport = 7000\n",
        };
        let text = configuration(&peer, &Site::paths(2), settings);
        let config = dibs_config::parse("lab", &text).unwrap();
        assert_eq!(config.daemon.integrity, dibs_config::Integrity::Off);
        assert_eq!(config.paths.len(), 2);
        assert_eq!(config.rules.len(), 1);
        let (path, endpoint) = &config.peers[0].endpoints[1];
        assert_eq!(
            (path.as_str(), endpoint.to_string().as_str()),
            ("wlan", "10.0.2.2:5300")
        );
    }
}
