//! What outlives the daemon: the user's rules, choices, and what peers asked for. A JSON file beside the
//! control socket, readable by its owner alone, replaced as a whole.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use dibs_config::PublicKey;
use dibs_control::{NewRule, RuleId, Selector};
use dibs_core::node::MovedPort;
use dibs_policy::claim::{self, Claim};
use dibs_settings::BumpId;
use dibs_switch::conns::{Choice, Socket};
use dibs_wire::FlowKey;
use serde::{Deserialize, Serialize};

use crate::control::ROOT;
use crate::data::bumps::{Carried, translation};
use crate::host::preferences::Wishes;
use crate::host::process::MonotonicWall;

/// Rules of the user are numbered from here, so that new rules in the file do not move them.
pub const FIRST_USER_RULE: RuleId = 1000;
/// The form of the file; others are refused.
const VERSION: u32 = 1;
/// The content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// Of the form.
    pub(crate) version: u32,
    /// The number of the next rule.
    pub next_rule: RuleId,
    /// Rules made with `dibsctl rule add`.
    pub rules: Vec<SavedRule>,
    /// Choices for live connections.
    pub choices: Vec<SavedChoice>,
    /// Bumps that a peer's rules use (bit n for bump n), by its public key.
    pub engaged: BTreeMap<String, u16>,
    /// This host's addresses, which connections may use longer than an interface has them.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// The bumps that are devices, by the numbers that they have here and in the kernel's marks.
    #[serde(default)]
    pub devices: BTreeMap<u8, String>,
    /// How late it was when this was written, for the daemon's calls.
    #[serde(default)]
    pub clock: Option<MonotonicWall>,
    /// How paths are used otherwise than the configuration says.
    #[serde(default)]
    pub preferences: Wishes,
    /// Live connections that peers call by other addresses.
    #[serde(default)]
    pub(crate) matched: Vec<SavedMatch>,
    /// Connections that have another port here than at the peer.
    #[serde(default)]
    pub(crate) moved: Vec<SavedPort>,
}

/// A rule as its user wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedRule {
    /// For the user.
    pub id: RuleId,
    /// As it was asked for.
    pub rule: NewRule,
    /// The uid of who asked.
    #[serde(default)]
    pub by: Option<u32>,
}

impl SavedRule {
    /// The uid of who made it. Where an older daemon did not note that: members of the group could name
    /// themselves only.
    pub fn maker(&self) -> u32 {
        let named = match &self.rule.selector {
            Selector::Match(named) => named.uid,
            _ => None,
        };
        self.by.or(named).unwrap_or(ROOT)
    }
}

/// Form of a connection in the file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "FlowKey")]
struct Conn {
    #[serde(getter = "FlowKey::source")]
    local: SocketAddr,
    #[serde(getter = "FlowKey::destination")]
    remote: SocketAddr,
}

impl From<Conn> for FlowKey {
    fn from(conn: Conn) -> Self {
        Self::tcp(conn.local, conn.remote)
    }
}

/// A choice and its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedChoice {
    /// The connection.
    #[serde(with = "Conn")]
    pub conn: FlowKey,
    /// Choice.
    pub choice: Choice,
    /// The peer was asked for its part in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub asked: bool,
    /// Choice that stood before, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stood: Option<Choice>,
}

/// A live connection and its name at the peer, both as this host sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedMatch {
    /// The connection.
    #[serde(with = "Conn")]
    pub(crate) conn: FlowKey,
    /// Name at the peer.
    #[serde(with = "Conn")]
    pub(crate) theirs: FlowKey,
    /// The peer's public key.
    pub(crate) peer: String,
    /// The socket here.
    pub(crate) socket: Socket,
}

/// A connection that has another port here than at the peer, both names as this host sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedPort {
    /// The connection.
    #[serde(with = "Conn")]
    pub(crate) conn: FlowKey,
    /// Name at the peer.
    #[serde(with = "Conn")]
    pub(crate) theirs: FlowKey,
    /// The peer's public key.
    pub(crate) peer: String,
}

impl Default for Saved {
    fn default() -> Self {
        Self {
            version: VERSION,
            next_rule: FIRST_USER_RULE,
            rules: Vec::new(),
            choices: Vec::new(),
            engaged: BTreeMap::new(),
            addresses: Vec::new(),
            devices: BTreeMap::new(),
            clock: None,
            preferences: Wishes::default(),
            matched: Vec::new(),
            moved: Vec::new(),
        }
    }
}

impl Saved {
    /// The content that `text` stands for.
    ///
    /// # Errors
    /// It is none, or of another version.
    pub fn from_json(text: &str) -> anyhow::Result<Self> {
        let saved: Self = serde_json::from_str(text).context("is not a state file")?;
        anyhow::ensure!(
            saved.version == VERSION,
            "is of version {}, and this dibsd writes {VERSION}",
            saved.version
        );
        Ok(saved)
    }

    /// Our numbers of the bumps that are devices, by those that the file has for them.
    pub(crate) fn devices(&self, carried: &[Carried]) -> BTreeMap<BumpId, BumpId> {
        let named = self.devices.iter();
        let named = named.filter_map(|(number, name)| Some((BumpId::new(*number)?, name.as_str())));
        translation(carried, named)
    }

    /// Connections with another port here than at the peer that has this public key.
    pub(crate) fn moved_ports(&self, peer: &PublicKey) -> Vec<MovedPort> {
        let peer = peer.to_string();
        let of_peer = self.moved.iter().filter(|saved| saved.peer == peer);
        let port = |saved: &SavedPort| MovedPort {
            ours: saved.conn,
            theirs: saved.theirs,
        };
        of_peer.map(port).collect()
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("our types have string keys only")
    }
}

/// Claim to steer this network namespace. Nothing where it cannot be made, which is said.
pub fn claim_namespace() -> anyhow::Result<Option<Claim>> {
    match claim::namespace() {
        Ok(claimed) => claimed
            .map(Some)
            .context("another dibsd steers this network namespace, with another control_socket; stop it first"),
        Err(error) => {
            tracing::warn!("cannot make sure that no other dibsd runs here: {error}");
            Ok(None)
        }
    }
}

/// The file, and the right to write it: no two daemons have one control socket.
pub struct StateFile {
    path: PathBuf,
    /// As last read or written.
    clock: Cell<Option<MonotonicWall>>,
    /// The last attempt to write it failed.
    is_behind: Cell<bool>,
    /// Locked as long as it is open.
    _lock: Claim,
}

impl StateFile {
    /// The file that belongs to a control socket, which no other daemon serves from now on.
    pub fn open(socket: &Path) -> anyhow::Result<Self> {
        let file = Self::open_unserved(socket)?;
        file.with_context(|| format!("another dibsd serves {}", socket.display()))
    }

    /// The same; nothing if another daemon serves the socket.
    pub fn open_unserved(socket: &Path) -> anyhow::Result<Option<Self>> {
        ensure_directory(socket)?;
        let lock_path = socket.with_extension("lock");
        let lock = claim::take(&lock_path);
        let lock = lock.with_context(|| format!("cannot lock {}", lock_path.display()))?;
        Ok(lock.map(|lock| Self {
            path: socket.with_extension("state"),
            clock: Cell::default(),
            is_behind: Cell::default(),
            _lock: lock,
        }))
    }

    /// Contents that were saved last; nothing if there is no file.
    ///
    /// # Errors
    /// The file cannot be read or understood. It is better not to start than to let connections go in
    /// plain that were to be on a bump.
    pub fn load(&self) -> anyhow::Result<Saved> {
        let path = self.path.display();
        let text = match fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Saved::default());
            }
            Err(error) => return Err(error).with_context(|| format!("cannot read {path}")),
        };
        let saved = Saved::from_json(&text).map_err(|why| {
            anyhow::anyhow!("{path} {why:#}: delete it to forget which connections users protected")
        })?;
        self.clock.set(saved.clock);
        Ok(saved)
    }

    /// Since 1970, what calls are to be later than: what was noted of the last run, gone on since.
    pub(crate) fn earliest(&self) -> Duration {
        let before = self.clock.get();
        before.map_or(Duration::ZERO, |_| {
            MonotonicWall::after_last(before).after()
        })
    }

    /// Whether it does not say what it should, for it could not be written.
    pub(crate) fn is_behind(&self) -> bool {
        self.is_behind.get()
    }

    /// Replaces the file, and notes there how late it is.
    pub fn save(&self, saved: Saved) -> anyhow::Result<()> {
        let clock = Some(MonotonicWall::after_last(self.clock.get()));
        self.clock.set(clock);
        let text = Saved { clock, ..saved }.to_json();
        let new = self.path.with_extension("state.new");
        let write = || -> std::io::Result<()> {
            let mut file =
                private(OpenOptions::new().write(true).create(true).truncate(true)).open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &self.path)
        };
        let written = write().with_context(|| format!("cannot write {}", self.path.display()));
        self.is_behind.set(written.is_err());
        written
    }
}

/// Makes the directory of a control socket where nothing else did, as systemd does for the service.
fn ensure_directory(socket: &Path) -> anyhow::Result<()> {
    let Some(directory) = socket.parent() else {
        return Ok(());
    };
    match DirBuilder::new().mode(0o750).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| {
                format!(
                    "cannot make the directory of control_socket {}",
                    socket.display()
                )
            })
        }
        _ => Ok(()),
    }
}

fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    options.mode(0o600)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dibs_control::{Match, Terms};
    use dibs_switch::conns::{Socket, Version};
    use std::os::unix::fs::PermissionsExt as _;

    fn saved() -> Saved {
        let choice = Choice {
            bump: BumpId::new(1),
            socket: Socket(77),
            version: Version {
                generation: 2,
                host: u64::MAX,
            },
        };
        Saved {
            next_rule: 1002,
            rules: vec![SavedRule {
                id: 1001,
                rule: NewRule {
                    terms: Terms::from_iter([("match", "-m tos --tos 8".to_owned())]),
                    prefer: true,
                    priority: -3,
                    ..NewRule::new(Selector::All, "scramble")
                },
                by: Some(0),
            }],
            choices: vec![SavedChoice {
                conn: FlowKey::tcp(
                    ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 40000),
                    ([0xfd00, 0, 0, 0, 0, 0, 0, 2], 80),
                ),
                choice,
                asked: true,
                stood: None,
            }],
            engaged: BTreeMap::from([("key".to_owned(), 2)]),
            addresses: vec!["fd00::1".parse().unwrap()],
            ..Saved::default()
        }
    }

    #[test]
    fn comes_back_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::open(&dir.path().join("dibsd.sock")).unwrap();
        assert_eq!(file.load().unwrap(), Saved::default());
        file.save(saved()).unwrap();
        file.save(saved()).unwrap();
        let loaded = file.load().unwrap();
        assert!(loaded.clock.is_some());
        let clock = None;
        assert_eq!(Saved { clock, ..loaded }, saved());
        let names: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .collect();
        assert_eq!(names.len(), 2, "state and lock: {names:?}");
        for entry in names {
            assert_eq!(
                entry.metadata().unwrap().permissions().mode() & 0o777,
                0o600
            );
        }
    }

    #[test]
    fn rules_of_an_older_daemon_are_of_whom_they_name() {
        let rule = |selector: &str| {
            let text = format!(
                r#"{{"id":1000,"rule":{{"selector":{selector},"bump":"seal","require":true}}}}"#
            );
            serde_json::from_str::<SavedRule>(&text).unwrap()
        };
        assert_eq!(rule(r#"{"match":{"uid":1000}}"#).maker(), 1000);
        assert_eq!(rule(r#"{"match":{"dport":80}}"#).maker(), ROOT);
        assert_eq!(rule(r#""all""#).maker(), ROOT);
        // Root's rule for a user is root's, since that is noted.
        let noted = SavedRule {
            by: Some(ROOT),
            ..rule(r#"{"match":{"uid":1000}}"#)
        };
        assert_eq!(noted.maker(), ROOT);
        let of = Match {
            uid: Some(1000),
            ..Match::default()
        };
        assert_eq!(noted.rule.selector, Selector::Match(of));
    }

    #[test]
    fn what_is_not_understood_is_not_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::open(&dir.path().join("dibsd.sock")).unwrap();
        for text in ["", "{}", r#"{"version":2}"#, "null"] {
            fs::write(dir.path().join("dibsd.state"), text).unwrap();
            assert!(file.load().is_err(), "{text}");
        }
        let mut other = saved();
        other.version = 2;
        file.save(other).unwrap();
        let error = file.load().unwrap_err().to_string();
        assert!(error.contains("is of version 2"), "{error}");
    }

    #[test]
    fn one_daemon_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        // The first one makes the directory.
        let socket = dir.path().join("run/dibsd.sock");
        let first = StateFile::open(&socket).unwrap();
        let error = StateFile::open(&socket).err().unwrap().to_string();
        assert!(error.starts_with("another dibsd serves"), "{error}");
        assert!(StateFile::open_unserved(&socket).unwrap().is_none());
        drop(first);
        assert!(StateFile::open(&socket).is_ok());
        let nowhere = dir.path().join("not/there/dibsd.sock");
        let error = StateFile::open(&nowhere).err().unwrap().to_string();
        assert!(
            error.starts_with("cannot make the directory of control_socket"),
            "{error}"
        );
    }
}
