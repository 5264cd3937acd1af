//! dibsd on hosts of the lab, and dibsctl to steer it: the real programs with real configurations.

use std::fs::OpenOptions;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
pub use dibs_control::Trust;
use dibs_control::{Changed, PathInfo, PathState, PeerInfo, PeerState, Status};
use dibs_netns::{HANG, Host, Process, wait_for};
use nix::sys::signal::Signal;
use serde::de::DeserializeOwned;

/// The daemon's UDP port, on all paths.
pub const PORT: u16 = 5300;
/// Where TUNs come from.
const TUN: &str = "/dev/net/tun";
/// Makes the daemon's directory and keys by the dibsctl in `$0`, and prints the public one.
const MAKE_KEYS: &str = "umask 077; mkdir /run/dibs; \"$0\" genkey >/run/dibs/private.key; \
     \"$0\" pubkey </run/dibs/private.key";
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

/// Settings of one host beside its key, paths and peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings<'a> {
    /// Further lines of `[daemon]`.
    pub daemon: &'a str,
    /// Further tables, such as `[[rule]]`.
    pub tables: &'a str,
}

impl Programs {
    /// Programs beside the running one, or else those that are installed.
    ///
    /// # Errors
    /// If one is missing.
    pub fn find() -> Result<Self> {
        let own = std::env::current_exe().context("the running program's place")?;
        Self::beside(own.parent().unwrap_or(Path::new("/")))
    }

    /// Programs of a directory, or else those that are installed.
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
    ) -> Result<[Dibsd; 2]> {
        let tun = OpenOptions::new().read(true).write(true).open(TUN);
        tun.with_context(|| format!("{TUN}, which dibsd needs, and which usually is open to all"))?;
        let [(near, near_key), (far, far_key)] = [self.on(hosts[0])?, self.on(hosts[1])?];
        let (mut daemons, keys) = ([near, far], [near_key, far_key]);
        for (near, far) in [(0, 1), (1, 0)] {
            let addresses = paths.iter().map(|path| path.ends[far]);
            let names = paths.iter().map(|path| path.name);
            let endpoints = addresses.clone().map(|ip| SocketAddr::new(ip, PORT));
            let peer = Peer {
                name: hosts[far].name(),
                public_key: &keys[far],
                addresses: &addresses.map(host_prefix).collect::<Vec<_>>(),
                endpoints: &names.zip(endpoints).collect::<Vec<_>>(),
            };
            daemons[near].configure(&configuration(paths, &peer, settings[near]))?;
            daemons[near].spawn()?;
        }
        for daemon in &mut daemons {
            daemon.wait_until_joined(paths.len())?;
        }
        Ok(daemons)
    }

    /// Makes a new key pair on a host, whose daemon does not run yet; returns its public key too.
    ///
    /// # Errors
    /// If that was done there before, or dibsctl fails.
    pub fn on(&self, host: &Host) -> Result<(Dibsd, String)> {
        let mut shell = host.command("sh");
        shell.args(["-ec", MAKE_KEYS]).arg(&self.dibsctl);
        let public = host.run_within(HANG, shell)?.stdout;
        let public = String::from_utf8(public).context("a key in base64")?;
        let daemon = Dibsd {
            host: host.clone(),
            programs: self.clone(),
            process: None,
            prelude: String::new(),
            logs: String::new(),
        };
        Ok((daemon, public.trim().to_owned()))
    }
}

/// The far end, as a configuration names it.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its key, in base64.
    pub public_key: &'a str,
    /// Its addresses and networks, in quotation marks.
    pub addresses: &'a [String],
    /// Addresses by which its daemon is called, by path.
    pub endpoints: &'a [(&'a str, SocketAddr)],
}

/// An address alone, as a configuration has it.
fn host_prefix(ip: IpAddr) -> String {
    let bits = if ip.is_ipv4() { 32 } else { 128 };
    format!("\"{ip}/{bits}\"")
}

/// The configuration of a host with these paths to one peer.
pub fn configuration(paths: &[PathSpec], peer: &Peer<'_>, settings: Settings<'_>) -> String {
    let Settings { daemon, tables } = settings;
    let mut text = format!(
        "[daemon]\nprivate_key_file = \"/run/dibs/private.key\"\nstate_dir = \"/run/dibs/lib\"\n{daemon}\n"
    );
    for path in paths {
        let (name, interface, trust) = (path.name, path.interface, path.trust.as_str());
        text += &format!(
            "[[path]]\nname = \"{name}\"\ninterface = \"{interface}\"\ntrust = \"{trust}\"\n"
        );
    }
    let (name, key, addresses) = (peer.name, peer.public_key, peer.addresses.join(", "));
    text += &format!(
        "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\naddresses = [{addresses}]\n[peer.endpoints]\n"
    );
    for (path, endpoint) in peer.endpoints {
        text += &format!("{path} = \"{endpoint}\"\n");
    }
    text + tables
}

/// dibsd on a host: its keys, its configuration, and the program while it runs; killed when dropped.
#[derive(Debug)]
pub struct Dibsd {
    /// The host, whose `/run` is its own.
    pub host: Host,
    programs: Programs,
    process: Option<Process>,
    /// Lines of a shell in front of the program.
    prelude: String,
    /// What earlier daemons of this host logged.
    logs: String,
}

impl Dibsd {
    /// The host's `/run/dibs`, as seen from this process.
    pub fn directory(&self) -> PathBuf {
        self.host.run_dir().join("dibs")
    }

    /// Writes the configuration that the next daemon reads.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn configure(&self, config: &str) -> Result<()> {
        std::fs::write(self.directory().join("dibsd.toml"), config).context("configuration")
    }

    /// Has a line of a shell precede the next daemons: it may export what they find in their environment.
    pub fn precede(&mut self, line: &str) {
        self.prelude += line;
        self.prelude.push('\n');
    }

    /// Starts the daemon.
    ///
    /// # Errors
    /// If its program does not start.
    pub fn spawn(&mut self) -> Result<()> {
        self.forget();
        let mut shell = self.host.command("sh");
        let lines = format!("{}exec \"$0\" --config /run/dibs/dibsd.toml", self.prelude);
        shell.args(["-ec", &lines]).arg(&self.programs.dibsd);
        self.process = Some(self.host.spawn(shell)?);
        Ok(())
    }

    /// Sends the daemon a signal.
    ///
    /// # Errors
    /// If none runs.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.process()?.signal(signal)
    }

    /// Sends the daemon a signal and waits for its end; what it logged is kept.
    ///
    /// # Errors
    /// If none runs, or it does not end, or not well.
    pub fn stop(&mut self, signal: Signal) -> Result<()> {
        self.signal(signal)?;
        let status = self.process()?.wait(HANG)?;
        ensure!(
            signal == Signal::SIGKILL || status.success(),
            "dibsd ended with {status}: {}",
            self.log()
        );
        self.forget();
        Ok(())
    }

    /// Waits for a daemon to end by itself, and returns what it said.
    ///
    /// # Errors
    /// If it does not, or says that all is well.
    pub fn refusal(&mut self) -> Result<String> {
        let status = self.process()?.wait(HANG)?;
        ensure!(!status.success(), "dibsd ended with {status}");
        let ended = self.process.take();
        Ok(ended.map_or_else(String::new, |ended| ended.stderr()))
    }

    /// True if the daemon runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_running)
    }

    /// The process that runs the daemon.
    ///
    /// # Errors
    /// If none was started.
    pub fn process(&mut self) -> Result<&mut Process> {
        self.process.as_mut().context("no daemon runs")
    }

    /// The daemon's process id, if there is one.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Lines that the host's daemons logged so far.
    pub fn log(&self) -> String {
        let current = self.process.as_ref().map(Process::stderr);
        format!("{}{}", self.logs, current.unwrap_or_default())
    }

    fn forget(&mut self) {
        if let Some(daemon) = self.process.take() {
            self.logs += &daemon.stderr();
            self.logs += "--- the end of this daemon\n";
        }
    }

    /// A command of `dibsctl --json` on the daemon's host.
    pub fn dibsctl(&self, arguments: &[&str]) -> Command {
        let mut command = self.host.command(&self.programs.dibsctl);
        command.arg("--json").args(arguments);
        command
    }

    /// Answer of such a command.
    ///
    /// # Errors
    /// If it refuses or fails; with its sentence.
    pub fn ctl<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        let output = self.host.spawn(self.dibsctl(arguments))?.output(HANG)?;
        let line = arguments.join(" ");
        if !output.status.success() {
            let sentence = String::from_utf8_lossy(&output.stderr);
            let sentence = sentence.trim().trim_start_matches("dibsctl: ");
            bail!("dibsctl {line} on {}: {sentence}", self.host.name());
        }
        serde_json::from_slice(&output.stdout).with_context(|| {
            let printed = String::from_utf8_lossy(&output.stdout);
            format!("what dibsctl {line} printed: {printed}")
        })
    }

    /// Moves the connections with this port at an end, `--dport` or `--sport`, to a bump or to plain.
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl).
    pub fn move_to(&self, (end, port): (&str, u16), bump: &str) -> Result<Changed> {
        let port = port.to_string();
        match bump {
            "plain" => self.ctl(&["disable", end, &port]),
            bump => self.ctl(&["enable", end, &port, "--bump", bump]),
        }
    }

    /// The same of one connection.
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl), or if there is none or more than one.
    pub fn switch(&self, of: (&str, u16), bump: &str) -> Result<Changed> {
        let changed = self.move_to(of, bump)?;
        let moved = changed.connections.len();
        ensure!(
            moved == 1,
            "{moved} connections were switched to {bump} instead of one"
        );
        Ok(changed)
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
    ///
    /// # Errors
    /// If the daemon ends, or they do not get so far; with what it logged.
    pub fn wait_until_joined(&mut self, paths: usize) -> Result<()> {
        let mut last = None;
        let joined = wait_for(HANG, "dibsd's session and paths", || {
            // One that somebody else started is not known to end.
            if self
                .process
                .as_mut()
                .is_some_and(|dibsd| !dibsd.is_running())
            {
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
        let printed = || format!("dibsd on {}:\n{}", self.host.name(), self.log());
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
            addresses: &["\"10.0.1.2/32\"".to_owned()],
            endpoints: &[
                ("eth", "10.0.1.2:5300".parse().unwrap()),
                ("wlan", "10.0.2.2:5300".parse().unwrap()),
            ],
        };
        let settings = Settings {
            daemon: "integrity = \"off\"",
            tables: "[[rule]]\nbump = \"scramble\"\ndport = 7000\n",
        };
        let text = configuration(&Site::paths(2), &peer, settings);
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
