//! A host with its keys, its configuration, and `dibsd` on it.

use std::fmt::Write as _;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, ensure};
use dibs_config::PrivateKey;
use dibs_lab::dibs::Dibsd;
use dibs_netns::{HANG, Host, Process};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::programs;

/// Time that any answer of the daemon may take, handshakes with a peer that was away included; only one that hangs
/// takes as long.
pub const SOON: Duration = HANG;

/// At least so long between two looks that start a program each, and as long as that took: less would take the
/// processor from those who are waited for.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits until a condition holds that is asked of a program.
///
/// # Errors
/// If that is not [`SOON`], naming `what` was awaited.
pub fn wait(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + SOON;
    loop {
        let look = Instant::now();
        if holds() {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "waited {SOON:?} in vain for {what}"
        );
        std::thread::sleep(PAUSE.max(look.elapsed()));
    }
}

/// Has the daemon be told what systemd says where standard error leads to the journal (systemd.exec(5)).
const JOURNALED: &str = "export JOURNAL_STREAM=$(stat --dereference --format=%d:%i /dev/stderr)";

/// One of the two hosts.
#[derive(Debug)]
pub struct Node {
    dibsd: Dibsd,
}

impl Deref for Node {
    type Target = Dibsd;

    fn deref(&self) -> &Dibsd {
        &self.dibsd
    }
}

impl DerefMut for Node {
    fn deref_mut(&mut self) -> &mut Dibsd {
        &mut self.dibsd
    }
}

impl Node {
    /// A host with a new key pair; returns its public key too.
    pub(crate) fn new(host: &Host) -> Result<(Self, String)> {
        let (mut dibsd, key) = programs::find()?.on(host)?;
        dibsd.precede("export DIBS_LOG=debug");
        Ok((Self { dibsd }, key))
    }

    /// The host's private key.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn private_key(&self) -> Result<PrivateKey> {
        let file = self.directory().join("private.key");
        dibs_config::read_private_key(&file).context("private key")
    }

    /// State file of the daemon.
    pub fn state_file(&self) -> PathBuf {
        self.directory().join("dibsd.state")
    }

    /// Contents of the state file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn saved(&self) -> Result<String> {
        std::fs::read_to_string(self.state_file()).context("state of the daemon")
    }

    /// Keeps the daemon from writing its state, until [`mend_state`](Self::mend_state).
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn spoil_state(&self) -> Result<()> {
        std::fs::create_dir(self.state_file().with_extension("state.new")).context("spoiled state")
    }

    /// Lets the daemon write its state again.
    ///
    /// # Errors
    /// If it was not [spoiled](Self::spoil_state).
    pub fn mend_state(&self) -> Result<()> {
        std::fs::remove_dir(self.state_file().with_extension("state.new")).context("spoiled state")
    }

    /// Starts the daemon and waits until it answers.
    ///
    /// # Errors
    /// If it ends instead; with what it said.
    pub fn start(&mut self) -> Result<()> {
        self.spawn()?;
        wait("an answer of the daemon", || {
            !self.is_running() || self.ctl(&["peer", "list"]).is_ok()
        })?;
        ensure!(self.is_running(), "dibsd ended: {}", self.log());
        Ok(())
    }

    /// Has the next daemon be told, as systemd does, that its standard error leads to the journal.
    pub fn set_journaled(&mut self) {
        self.precede(JOURNALED);
    }

    /// Has the next daemon live where it is `second` seconds after midnight now.
    pub fn set_time_of_day(&mut self, second: u32) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let utc = since.unwrap_or_default().as_secs() % 86_400;
        // POSIX counts zones westwards, and as far as a day and less than an hour.
        let west = (utc + 86_400 - u64::from(second)) % 86_400;
        let (hours, minutes) = (west / 3600, west / 60 % 60);
        let zone = format!("LAB{hours}:{minutes:02}:{:02}", west % 60);
        self.precede(&format!("export TZ={zone}"));
    }

    /// Suspends the daemon.
    ///
    /// # Errors
    /// If none runs.
    pub fn suspend(&mut self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets a suspended daemon go on.
    ///
    /// # Errors
    /// If none runs.
    pub fn go_on(&mut self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Has the daemon take the rules of its file as they are now (SIGHUP).
    ///
    /// # Errors
    /// If none runs.
    pub fn reload(&mut self) -> Result<()> {
        self.signal(Signal::SIGHUP)
    }

    /// Answer of a command of `dibsctl --json`.
    ///
    /// # Errors
    /// If it fails; with what it said.
    pub fn ctl(&self, arguments: &[&str]) -> Result<Value> {
        self.dibsd.ctl(arguments)
    }

    /// Line for peers that `dibsctl init` with these wishes shows.
    ///
    /// # Errors
    /// If it fails, or warns of anything.
    pub fn init(&self, wishes: &[&str]) -> Result<String> {
        let file = "/run/dibs/dibsd.toml";
        let answer = self.ctl(&[&["init", "--config", file], wishes].concat())?;
        let warnings = &answer["warnings"];
        ensure!(warnings.as_array().is_some_and(Vec::is_empty), "{warnings}");
        Ok(answer["line"].as_str().unwrap_or_default().to_owned())
    }

    /// Words of a command that must be refused, on standard error.
    ///
    /// # Errors
    /// If it does anything but exit with 1.
    pub fn refused(&self, arguments: &[&str]) -> Result<String> {
        let output = self.host.spawn(self.dibsctl(arguments))?.output(SOON)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(1),
            "dibsctl {} on host {}: {}, {said}",
            arguments.join(" "),
            self.host.name(),
            output.status
        );
        Ok(said)
    }

    /// Answer of `dibsctl doctor`, whatever it finds.
    ///
    /// # Errors
    /// If that is no answer, or its exit status says something else.
    pub fn doctor(&self) -> Result<Value> {
        let mut command = self.host.command(programs::built("dibsctl"));
        command.args(["--json", "doctor", "--config", "/run/dibs/dibsd.toml"]);
        let output = self.host.spawn(command)?.output(SOON)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let answer: Value = serde_json::from_slice(&output.stdout).context(said)?;
        let content = output.status.code() == Some(0);
        ensure!(answer["ok"] == content, "{}: {answer:#}", output.status);
        Ok(answer)
    }

    /// Checks of this name in the answer of `dibsctl doctor`, one after the other.
    ///
    /// # Errors
    /// As [`doctor`](Self::doctor).
    pub fn diagnosis(&self, check: &str) -> Result<String> {
        let answer = self.doctor()?;
        let checks = answer["checks"].as_array().into_iter().flatten();
        let of_it = checks.filter(|found| found["check"] == check);
        Ok(of_it.map(ToString::to_string).collect())
    }

    /// Adds lines to the configuration that the next daemon reads.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn configure_more(&self, lines: &str) -> Result<()> {
        let file = self.directory().join("dibsd.toml");
        let config = std::fs::read_to_string(file).context("configuration")?;
        self.configure(&(config + lines))
    }

    /// Follows the daemon's events from now on; they are on standard output.
    ///
    /// # Errors
    /// If that does not begin.
    pub fn events(&self) -> Result<Process> {
        let events = self.host.spawn(self.dibsctl(&["events"]))?;
        // Something that is told, until it is heard.
        wait("events to be followed", || {
            let made = self.ctl(&["rule", "add", "--dport", "9", "--bump", "scramble"]);
            let id = made.map(|made| made["id"].to_string());
            let gone = id.and_then(|id| self.ctl(&["rule", "del", &id]));
            gone.is_ok() && events.stdout().contains("rule_added")
        })?;
        Ok(events)
    }

    /// Waits until the session with the peer stands, with both paths up.
    ///
    /// # Errors
    /// If it does not.
    pub fn wait_established(&mut self) -> Result<()> {
        self.wait_until_joined(2)
    }

    /// Waits until a path is in this state.
    ///
    /// # Errors
    /// If it does not get there.
    pub fn wait_path(&self, name: &str, state: &str) -> Result<()> {
        let mut seen = Value::Null;
        let there = wait(&format!("path {name} to be {state}"), || {
            let paths = self.ctl(&["path", "list"]).unwrap_or_default();
            let there = named(&paths, name).is_some_and(|path| path["state"] == state);
            seen = paths;
            there
        });
        there.with_context(|| format!("host {}: {seen:#}", self.host.name()))
    }

    /// The entry of a path in `path list`.
    ///
    /// # Errors
    /// If there is none.
    pub fn path(&self, name: &str) -> Result<Value> {
        let paths = self.ctl(&["path", "list"])?;
        named(&paths, name).cloned().context("no such path")
    }

    /// A counter of `status`, as it is now: those of the kernel are kept for a second.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let mut status = Value::Null;
        wait("the kernel's counters", || {
            status = self.ctl(&["status"]).unwrap_or_default();
            status["counted"].as_f64().is_some_and(|at| at >= since)
        })?;
        let count = status["counters"][name].as_u64();
        count.with_context(|| format!("no counter {name}: {status:#}"))
    }

    /// Puts the default bump into the live connections to this port.
    ///
    /// # Errors
    /// If that changes none, or leaves one out.
    pub fn enable(&self, dport: u16) -> Result<()> {
        self.switch("enable", "--dport", dport)
    }

    /// Takes the live connections to this port back to plain.
    ///
    /// # Errors
    /// If that changes none, or leaves one out.
    pub fn disable(&self, dport: u16) -> Result<()> {
        self.switch("disable", "--dport", dport)
    }

    /// Enables or disables, by the far end's port (`--dport`) or this end's (`--sport`).
    ///
    /// # Errors
    /// If that changes none, or leaves one out.
    pub fn switch(&self, command: &str, end: &str, port: u16) -> Result<()> {
        self.change(&[command, end, &port.to_string()])
    }

    /// Moves the live connections of a port, by the far end's (`--dport`) or this end's (`--sport`), to
    /// a bump, or to "plain".
    ///
    /// # Errors
    /// If that changes none, or leaves one out.
    pub fn put_on(&self, bump: &str, end: &str, port: u16) -> Result<()> {
        match bump {
            "plain" => self.switch("disable", end, port),
            _ => self.change(&["enable", end, &port.to_string(), "--bump", bump]),
        }
    }

    fn change(&self, arguments: &[&str]) -> Result<()> {
        let changed = self.ctl(arguments)?;
        let count = |key: &str| changed[key].as_array().map_or(0, Vec::len);
        ensure!(
            count("connections") > 0 && count("skipped") == 0,
            "{} on host {}: {changed:#}",
            arguments.join(" "),
            self.host.name()
        );
        Ok(())
    }

    /// The bump of each live connection of which either end has this port.
    ///
    /// # Errors
    /// If `conn list` fails.
    pub fn bumps(&self, port: u16) -> Result<Vec<String>> {
        let conns = self.ctl(&["conn", "list"])?;
        let conns = conns.as_array().context("conn list is an array")?;
        let end = format!(":{port}");
        let with_port = conns.iter().filter(|conn| {
            let ends = [&conn["local"], &conn["remote"]];
            ends.iter()
                .any(|address| address.as_str().is_some_and(|text| text.ends_with(&end)))
        });
        let bump = |conn: &Value| conn["bump"].as_str().map(str::to_owned);
        with_port
            .map(|conn| bump(conn).ok_or_else(|| anyhow!("no bump: {conn}")))
            .collect()
    }

    /// Waits until all live connections of a port, of which there are some, have this bump.
    ///
    /// # Errors
    /// If they do not.
    pub fn wait_bump(&self, port: u16, bump: &str) -> Result<()> {
        let mut seen = Vec::new();
        let what = format!("connections of port {port} on {bump}");
        let on = wait(&what, || {
            seen = self.bumps(port).unwrap_or_default();
            !seen.is_empty() && seen.iter().all(|on| on == bump)
        });
        on.with_context(|| format!("host {}: {seen:?}", self.host.name()))
    }

    /// Waits until the connection of a port is LOCKED on `scramble` in the kernel.
    ///
    /// # Errors
    /// If it is not.
    pub fn wait_locked(&self, port: u16) -> Result<()> {
        let port = format!("dport={port} ");
        let mut seen = Vec::new();
        let locked = wait("a locked connection", || {
            seen = crate::kernel::marked(&self.host).unwrap_or_default();
            seen.iter().any(|line| {
                let mark = line.split(' ').find_map(|word| word.strip_prefix("mark="));
                let mark = mark.and_then(|mark| mark.parse::<u32>().ok());
                let on_bump = |m: u32| m & 0x2000_0000 != 0 && m & 0xf00_0000 != 0;
                line.contains(&port) && mark.is_some_and(on_bump)
            })
        });
        locked.with_context(|| format!("host {}: {seen:#?}", self.host.name()))
    }

    /// Everything that helps to see why a test failed.
    pub(crate) fn describe(&self) -> String {
        let name = self.host.name();
        let mut text = format!("===== host {name}: log of dibsd\n{}", self.log());
        let dibsctl = programs::built("dibsctl").display().to_string();
        // Connections first: they may go on meanwhile.
        for command in [
            "ss -tnoi".to_owned(),
            "cat /proc/net/netstat".to_owned(),
            format!("{dibsctl} status"),
            format!("{dibsctl} conn list"),
            "iptables-save".to_owned(),
            "ip6tables-save".to_owned(),
            "nft list ruleset".to_owned(),
            "ip rule".to_owned(),
            "ip -6 rule".to_owned(),
            "ip route show table all".to_owned(),
            "ip address".to_owned(),
            "conntrack -L".to_owned(),
            "conntrack -S".to_owned(),
        ] {
            let said = self
                .host
                .run(&command)
                .unwrap_or_else(|error| format!("{error:#}\n"));
            // Infallible: a String takes everything.
            let _ = write!(text, "===== host {name}: {command}\n{said}");
        }
        text
    }
}

/// The entry of this name.
fn named<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    let mut entries = list.as_array()?.iter();
    entries.find(|entry| entry["name"] == name)
}
