//! The bumps: those that are built in, as each `[[bump]]` sets them, and devices.

use dibs_settings::{BumpId, DIRECT, Wrong, meant, no_such_word};
use serde::Deserialize;

use crate::check::read;
use crate::error::Error;
use crate::table::Origin;
use crate::{BumpConfig, BumpKind, DEVICE, PathConfig};

/// Bumps are numbered in four bits: 0 is none, 15 the daemon's own sockets, below 8 what is built in.
const MOST_DEVICES: usize = 7;
/// As many as a daemon can have paths.
const MAX_SHARES: usize = 32;

/// A bump that exists without being listed, as it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltIn {
    /// The papers' scrambler.
    Scramble,
    /// Secret sharing over the paths.
    Share {
        /// So many shares give the data, at least 2.
        needed: u8,
        /// So many there are, each on a path of its own: at most 32.
        shares: u8,
    },
    /// Authenticated encryption.
    Seal {
        /// Lengths are hidden.
        padding: bool,
    },
}

impl BuiltIn {
    /// List of all, with nothing set, on a host with two paths.
    pub const ALL: &'static [Self] = &[
        Self::Scramble,
        Self::Share {
            needed: 2,
            shares: 2,
        },
        Self::Seal { padding: false },
    ];

    /// All of them on a host with so many paths, with nothing set.
    pub fn usual(paths: usize) -> Vec<Self> {
        let all = Self::ALL.iter();
        all.map(|bump| match bump {
            Self::Share { .. } => {
                let shares = paths.clamp(2, MAX_SHARES) as u8;
                Self::Share {
                    needed: shares,
                    shares,
                }
            }
            Self::Scramble | Self::Seal { .. } => *bump,
        })
        .collect()
    }

    /// Its name and kind in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scramble => "scramble",
            Self::Share { .. } => "share",
            Self::Seal { .. } => "seal",
        }
    }

    /// Its number in marks and between daemons.
    pub const fn number(self) -> BumpId {
        match self {
            Self::Scramble => BumpId::SCRAMBLE,
            Self::Share { .. } => BumpId::SHARE,
            Self::Seal { .. } => BumpId::SEAL,
        }
    }

    /// Warning for its users.
    pub const fn warning(self) -> Option<&'static str> {
        match self {
            Self::Scramble => Some(
                "scramble: text can be recovered from the untrusted path alone (docs/threat-model.md); for \
                 secrecy use seal or share",
            ),
            Self::Share { .. } | Self::Seal { .. } => None,
        }
    }

    /// How many shares of how many give the data, if it is split.
    pub const fn shares(self) -> Option<(u8, u8)> {
        match self {
            Self::Share { needed, shares } => Some((needed, shares)),
            Self::Scramble | Self::Seal { .. } => None,
        }
    }

    /// Keys of its `[[bump]]`. Without any it cannot be listed.
    pub const fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Scramble => &[],
            Self::Share { .. } => &["shares", "needed"],
            Self::Seal { .. } => &["padding"],
        }
    }
}

/// A `[[bump]]`, with the keys of every kind.
#[derive(Deserialize)]
#[serde(rename = "[[bump]]")]
pub(crate) struct BumpTable {
    #[serde(deserialize_with = "read::name")]
    name: String,
    kind: String,
    #[serde(default, deserialize_with = "read::device")]
    device: Option<String>,
    #[serde(default, deserialize_with = "read::whole::<0, MOST, u32, _, _>")]
    shares: Option<u32>,
    #[serde(default, deserialize_with = "read::whole::<0, MOST, u32, _, _>")]
    needed: Option<u32>,
    padding: Option<bool>,
}

const MOST: i64 = u32::MAX as i64;

/// All that exist without being listed, as they are set, then the devices.
pub(crate) fn bumps(
    tables: &[BumpTable],
    paths: &[PathConfig],
    origin: &Origin,
) -> Result<Vec<BumpConfig>, Error> {
    bumps_beside(&BuiltIn::usual(paths.len()), tables, paths, origin)
}

/// The bumps of `usual`, as they are set, then the devices.
fn bumps_beside(
    usual: &[BuiltIn],
    tables: &[BumpTable],
    paths: &[PathConfig],
    origin: &Origin,
) -> Result<Vec<BumpConfig>, Error> {
    let built_in = |bump: &BuiltIn| BumpConfig {
        name: bump.name().to_owned(),
        kind: BumpKind::BuiltIn(*bump),
    };
    let mut bumps: Vec<BumpConfig> = usual.iter().map(built_in).collect();
    let mut listed = vec![false; usual.len()];
    for (index, table) in tables.iter().enumerate() {
        let place = |key: &str| format!("bump.{index}.{key}");
        let wrong = |(key, wrong): (&str, Wrong)| origin.wrong(&place(key), wrong);
        let name = &table.name;
        let (kind, keys) = match usual.iter().position(|bump| bump.name() == name) {
            Some(at) if !usual[at].keys().is_empty() => {
                if std::mem::replace(&mut listed[at], true) {
                    return Err(wrong(("name", Wrong::bare("is listed twice"))));
                }
                let bump = settings(table, usual[at], paths.len()).map_err(wrong)?;
                bumps[at].kind = BumpKind::BuiltIn(bump);
                (usual[at].name(), usual[at].keys())
            }
            None if name != "plain" && name != DIRECT => {
                let Some(device) = device(table, &bumps, paths).map_err(wrong)? else {
                    let message = "[[bump]] lacks \"device\"".to_owned();
                    let hint = Some("name the device of the VPN, such as tun0".to_owned());
                    return Err(origin.at_value(&format!("bump.{index}"), message, hint));
                };
                if bumps.len() == usual.len() + MOST_DEVICES {
                    let message =
                        format!("the file has more than {MOST_DEVICES} [[bump]] of kind device");
                    return Err(origin.at_key(&place("device"), message, None));
                }
                bumps.push(BumpConfig {
                    name: name.clone(),
                    kind: BumpKind::Device(device),
                });
                (DEVICE, &["device"][..])
            }
            _ => {
                let names: Vec<_> = usual.iter().map(|bump| bump.name()).collect();
                let names = names.join(", ");
                let taken = Wrong::new(
                    format!("\"{name}\" is taken"),
                    format!("choose another name: {names}, plain and {DIRECT} are taken"),
                );
                return Err(wrong(("name", taken)));
            }
        };
        let other = |key: &&str| !keys.contains(key) && origin.has(&place(key));
        if let Some(key) = ["device", "shares", "needed", "padding"]
            .iter()
            .find(|key| other(key))
        {
            let message = format!("is no key of kind \"{kind}\"");
            return Err(origin.at_key(&place(key), message, None));
        }
    }
    Ok(bumps)
}

/// Fault of the value under a key.
type Fault = (&'static str, Wrong);

/// What a `[[bump]]` makes of one that exists without being listed.
fn settings(table: &BumpTable, usual: BuiltIn, paths: usize) -> Result<BuiltIn, Fault> {
    check_kind(table, usual.name())?;
    match usual {
        BuiltIn::Scramble => Ok(usual),
        BuiltIn::Share { shares, .. } => scheme(table, shares, paths),
        BuiltIn::Seal { .. } => Ok(BuiltIn::Seal {
            padding: table.padding.unwrap_or(false),
        }),
    }
}

fn check_kind(table: &BumpTable, kind: &str) -> Result<(), Fault> {
    match table.kind == kind {
        true => Ok(()),
        false => Err(("kind", no_such_word(&table.kind, &[kind]))),
    }
}

/// As many shares as usual, all needed, where nothing else is said.
fn scheme(table: &BumpTable, usual: u8, paths: usize) -> Result<BuiltIn, Fault> {
    let most = paths.min(MAX_SHARES) as u32;
    let shares = table.shares.unwrap_or(usual.into());
    if table.shares.is_some() && !(2..=most).contains(&shares) {
        let wrong = Wrong::new(
            format!("is {shares}, but the file has {paths} path(s)"),
            "use 2 to as many as there are paths, because each share needs a path of its own",
        );
        return Err(("shares", wrong));
    }
    let needed = table.needed.unwrap_or(shares);
    if !(2..=shares).contains(&needed) {
        let wrong = Wrong::new(
            format!("is {needed}, of {shares} shares"),
            "use 2 to as many as there are shares",
        );
        return Err(("needed", wrong));
    }
    let [needed, shares] = [needed, shares].map(|number| number as u8);
    Ok(BuiltIn::Share { needed, shares })
}

/// The device of a `[[bump]]` that is one, if it names it.
fn device(
    table: &BumpTable,
    bumps: &[BumpConfig],
    paths: &[PathConfig],
) -> Result<Option<String>, Fault> {
    if bumps.iter().any(|bump| bump.name == table.name) {
        let wrong = format!("\"{}\" is taken by another", table.name);
        return Err(("name", Wrong::bare(wrong)));
    }
    check_kind(table, DEVICE)?;
    let device = &table.device;
    let is_it = |bump: &&BumpConfig| device.is_some() && bump.device() == device.as_deref();
    if let Some(other) = bumps.iter().find(is_it) {
        let wrong = format!("is also that of bump \"{}\"", other.name);
        return Err(("device", Wrong::bare(wrong)));
    }
    // Or what carries the bumps' data would go by a bump itself.
    let own = |path: &&PathConfig| device.is_some() && path.interface == *device;
    if let Some(path) = paths.iter().find(own) {
        let wrong = format!("is also the interface of path \"{}\"", path.name);
        let hint = "use the device of a VPN, which is no path";
        return Err(("device", Wrong::new(wrong, hint)));
    }
    Ok(device.clone())
}

/// Refuses the name under a key that is no bump out of these.
pub(crate) fn check_known(
    name: &str,
    bumps: &[BumpConfig],
    place: &str,
    origin: &Origin,
) -> Result<(), Error> {
    if bumps.iter().any(|bump| bump.name == name) {
        return Ok(());
    }
    let names: Vec<_> = bumps.iter().map(|bump| bump.name.as_str()).collect();
    let message = format!("\"{}\" is no known bump", name.escape_debug());
    Err(origin.wrong(place, Wrong::new(message, meant(name, &names))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Place of a bump in the list of all; a new variant does not compile without one.
    fn place(bump: BuiltIn) -> usize {
        match bump {
            BuiltIn::Scramble => 0,
            BuiltIn::Share { .. } => 1,
            BuiltIn::Seal { .. } => 2,
        }
    }

    #[test]
    fn the_list_has_every_bump_once() {
        let places: Vec<usize> = BuiltIn::ALL.iter().map(|bump| place(*bump)).collect();
        assert_eq!(places, [0, 1, 2]);
        assert_eq!(BuiltIn::usual(2), BuiltIn::ALL);
    }

    #[test]
    fn one_bump_more_can_be_listed_too() {
        let mut usual = vec![BuiltIn::Scramble];
        usual.extend(BuiltIn::ALL);
        let listed = |text: &str| {
            let origin = Origin::new("a.toml", text);
            #[derive(Deserialize)]
            struct File {
                bump: Vec<BumpTable>,
            }
            let file: File = origin.read().unwrap();
            bumps_beside(&usual, &file.bump, &[], &origin)
        };
        let seal = "[[bump]]\nname = \"seal\"\nkind = \"seal\"\npadding = true\n";
        let bumps = listed(seal).unwrap();
        assert_eq!(
            bumps[3].built_in(),
            Some(BuiltIn::Seal { padding: true }),
            "{bumps:?}"
        );
        let twice = listed(&seal.repeat(2)).unwrap_err().to_string();
        assert!(twice.contains("is listed twice"), "{twice}");
    }
}
