//! Wishes of the file's rules that were carried out last, kept over a start of the host: what the guard blocks by where the
//! file cannot be read.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use dibs_config::Config;
use dibs_control::RuleOrigin;
use dibs_policy::{Binding, BumpRoute, ClassRule, Desired, DeviceOwner};
use dibs_settings::BumpId;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::data::bumps::{carried, marks};
use crate::host::interfaces::Inventory;
use crate::host::volumes::write;
use crate::rulebook::rules::Rule;

/// Name in the configured directory.
const FILE: &str = "wishes.json";
/// Form of the file; others are refused.
const VERSION: u32 = 1;

/// Content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    version: u32,
    /// Socket of the daemon that carried them out: two daemons do not steer one host.
    pub(crate) control_socket: PathBuf,
    pub(crate) wish: Desired,
}

/// The wish that follows from the configuration, the rules, and the bumps in use.
pub fn desired(
    config: &Config,
    inventory: &Inventory,
    rules: impl Iterator<Item = ClassRule>,
    in_use: &BTreeSet<BumpId>,
    addresses: &[IpAddr],
) -> Desired {
    let peers: Vec<_> = config
        .peers
        .iter()
        .flat_map(|peer| peer.addresses.clone())
        .collect();
    let carried = carried(config);
    let foreign = |id: BumpId| {
        let bump = carried.iter().find(|bump| bump.id == id);
        bump.and_then(|bump| bump.device.as_deref())
    };
    let route = |&id: &BumpId| BumpRoute {
        id,
        device: inventory.device_name(foreign(id).unwrap_or(&id.tun_name())),
        owner: match foreign(id) {
            Some(_) => DeviceOwner::Foreign,
            None => DeviceOwner::Ours,
        },
        addresses: addresses.to_vec(),
        peers: peers.clone(),
    };
    Desired {
        marks: marks(config),
        table_base: config.daemon.table_base,
        fail: config.daemon.fail,
        gateway: config.daemon.gateway.clone(),
        exit: config.daemon.exits().to_vec(),
        refuse_quic: config.daemon.refuse_quic,
        bumps: in_use.iter().map(route).collect(),
        rules: rules
            .filter(|class| in_use.contains(&class.bump) || class.binding == Binding::Direct)
            .collect(),
        ..Desired::default()
    }
}

impl Kept {
    /// Wishes of the file's rules alone: those of users, and choices, do not outlive a start of the host.
    pub(crate) fn of<'a>(
        config: &Config,
        inventory: &Inventory,
        in_force: impl Iterator<Item = &'a Rule>,
        offset: i32,
    ) -> Self {
        let of_file = in_force.filter(|rule| rule.origin == RuleOrigin::Config);
        let rules: Vec<ClassRule> = of_file
            .flat_map(|rule| rule.classes_here(offset, inventory))
            .collect();
        let bumped = rules.iter().filter(|rule| rule.binding != Binding::Direct);
        let bumps: BTreeSet<_> = bumped.map(|rule| rule.bump).collect();
        let peers = config.peers.iter().flat_map(|peer| &peer.addresses);
        Self {
            version: VERSION,
            control_socket: config.daemon.control_socket.clone(),
            wish: Desired {
                sessions: peers.map(|net| (*net, false)).collect(),
                ..desired(config, inventory, rules.into_iter(), &bumps, &[])
            },
        }
    }

    /// Wishes that are kept in a directory; none if there is no file.
    ///
    /// # Errors
    /// The file cannot be read or understood.
    pub(crate) fn read(directory: &Path) -> anyhow::Result<Option<Self>> {
        let file = directory.join(FILE);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", file.display()));
            }
        };
        let kept = Self::from_json(&text).with_context(|| format!("{}", file.display()))?;
        Ok(Some(kept))
    }

    fn from_json(text: &str) -> anyhow::Result<Self> {
        let kept: Self = serde_json::from_str(text).context("is not a file of saved rules")?;
        ensure!(
            kept.version == VERSION,
            "is of version {}, and this dibsd writes {VERSION}",
            kept.version
        );
        kept.wish
            .validate()
            .context("has rules that are impossible")?;
        Ok(kept)
    }

    fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("our types have string keys only")
    }
}

/// Keeps wishes for the guard; what was last written is known.
#[derive(Default)]
pub(crate) struct Keeper(Mutex<Option<Kept>>);

impl Keeper {
    /// Keeps what was carried out `now`, if that is news; none: what is kept stays.
    pub(crate) async fn keep(
        &self,
        directory: PathBuf,
        now: impl FnOnce() -> Option<Kept>,
    ) -> anyhow::Result<()> {
        let mut known = self.0.lock().await;
        let Some(now) = now().filter(|now| known.as_ref() != Some(now)) else {
            return Ok(());
        };
        let wanted = now.clone();
        let written = tokio::task::spawn_blocking(move || {
            let is_news = match Kept::read(&directory) {
                Ok(Some(before)) => before != wanted,
                // Nothing to keep needs no file.
                Ok(None) => !wanted.wish.rules.is_empty(),
                Err(_) => true,
            };
            match is_news {
                true => write(&directory.join(FILE), &wanted.to_json()),
                false => Ok(()),
            }
        });
        written.await??;
        *known = Some(now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::bumps::carried;
    use crate::rulebook::RuleBook;
    use crate::rulebook::state_file::Saved;

    /// A file with rules of every kind.
    const RULES: &str = "[daemon]\ngateway = [\"192.168.7.0/24\"]\n\
        [[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
        [[peer]]\nname = \"b\"\npublic_key = \"hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=\"\n\
        addresses = [\"10.0.1.2/32\", \"fd00:1::/64\"]\n\
        [[bump]]\nname = \"vpn\"\nkind = \"device\"\ndevice = \"tun9\"\n\
        [[rule]]\nbump = \"seal\"\ndport = [80, \"8000-8010\"]\nsource = \"10.0.1.1/32\"\nrequire = true\n\
        [[rule]]\nbump = \"vpn\"\nuser = \"root\"\ntime = \"22:00-06:00\"\n\
        [[rule]]\nbump = \"scramble\"\ngid = 7\ninterface = \"eth0\"\ndscp = 8\nprefer = true\n\
        match = \"-m length --length 1000:65535\"\n\
        [[rule]]\nbump = \"seal\"\nuser = \"nobody-of-this-name\"\ndport = 22\nrequire = true\n\
        [[rule]]\nbump = \"seal\"\nuser = \"nobody-of-this-name\"\ndport = 23\n";

    fn kept() -> Kept {
        let config = dibs_config::parse("dibs.toml", RULES).unwrap();
        let book = RuleBook::restored(&config, &carried(&config), &Saved::default()).unwrap();
        Kept::of(&config, &Inventory::default(), book.in_force(), 0)
    }

    #[test]
    fn wishes_come_back_as_they_were() {
        let kept = kept();
        let ids: Vec<u32> = kept.wish.rules.iter().map(|rule| rule.id).collect();
        // The last one waits for its user, and nothing of it was carried out.
        assert_eq!(ids, [1, 1, 2, 3, 4]);
        assert_eq!(kept.wish.rules[2].uid, Some(0));
        let directory = tempfile::tempdir().unwrap();
        assert!(Kept::read(directory.path()).unwrap().is_none());
        write(&directory.path().join(FILE), &kept.to_json()).unwrap();
        assert_eq!(Kept::read(directory.path()).unwrap(), Some(kept));
    }

    #[test]
    fn wishes_that_were_not_understood_are_refused() {
        let text = kept().to_json();
        let refused = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            format!(
                "{:#}",
                Kept::from_json(&text.replacen(from, to, 1)).unwrap_err()
            )
        };
        assert!(refused("\"version\": 1", "\"version\": 2").contains("is of version 2"));
        assert!(refused("\"fail\"", "\"fall\"").contains("is not a file of saved rules"));
        assert!(refused("\"tun9\"", "\"../tun9\"").contains("usable device name"));
        assert!(refused("10.0.1.2/32", "127.0.0.1/32").contains("cannot be steered"));
        assert!(
            refused("\"first\": 80", "\"first\": 81").contains("a range of ports that has none")
        );
    }
}
