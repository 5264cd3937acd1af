//! The bumps: those that are built in, as each `[[bump]]` sets them, and devices.

use dibs_settings::BumpId;

use crate::check;
use crate::error::Error;
use crate::table::{Table, Value, Wrong, meant};
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

    /// What whoever uses it should hear.
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

/// What a `[[bump]]` may say.
pub(crate) fn keys() -> Vec<&'static str> {
    let settings = BuiltIn::ALL.iter().flat_map(|bump| bump.keys());
    let common = ["name", "kind", "device"];
    common.into_iter().chain(settings.copied()).collect()
}

/// All that exist without being listed, as they are set, then the devices.
pub(crate) fn bumps(
    tables: Vec<Table<'_>>,
    paths: &[PathConfig],
) -> Result<Vec<BumpConfig>, Error> {
    bumps_beside(&BuiltIn::usual(paths.len()), tables, paths)
}

/// The bumps of `usual`, as they are set, then the devices.
fn bumps_beside(
    usual: &[BuiltIn],
    tables: Vec<Table<'_>>,
    paths: &[PathConfig],
) -> Result<Vec<BumpConfig>, Error> {
    let built_in = |bump: &BuiltIn| BumpConfig {
        name: bump.name().to_owned(),
        kind: BumpKind::BuiltIn(*bump),
    };
    let mut bumps: Vec<BumpConfig> = usual.iter().map(built_in).collect();
    let mut listed = vec![false; usual.len()];
    for mut table in tables {
        let value = table.require("name")?;
        let name = value.parse(check::name)?;
        match usual.iter().position(|bump| bump.name() == name) {
            Some(at) if !usual[at].keys().is_empty() => {
                if std::mem::replace(&mut listed[at], true) {
                    return Err(value.error(Wrong::bare("is listed twice")));
                }
                let bump = settings(table, usual[at], paths.len())?;
                bumps[at].kind = BumpKind::BuiltIn(bump);
            }
            None if name != "plain" => {
                if bumps.iter().any(|bump| bump.name == name) {
                    let wrong = format!("\"{name}\" is taken by another");
                    return Err(value.error(Wrong::bare(wrong)));
                }
                let device = device(table, &bumps, usual.len() + MOST_DEVICES, paths)?;
                bumps.push(BumpConfig {
                    name,
                    kind: BumpKind::Device(device),
                });
            }
            _ => {
                let names: Vec<_> = usual.iter().map(|bump| bump.name()).collect();
                let names = names.join(", ");
                return Err(value.error(Wrong::new(
                    format!("\"{name}\" is taken"),
                    format!("{names} exist without being listed, plain is no bump"),
                )));
            }
        }
    }
    Ok(bumps)
}

/// What a `[[bump]]` makes of one that exists without being listed.
fn settings(mut table: Table<'_>, usual: BuiltIn, paths: usize) -> Result<BuiltIn, Error> {
    let kind = usual.name();
    table.require("kind")?.one_of(&[(kind, ())])?;
    match usual {
        BuiltIn::Scramble => {
            has_no_more(table, kind)?;
            Ok(usual)
        }
        BuiltIn::Share { shares, .. } => {
            let set = [number(&mut table, "shares")?, number(&mut table, "needed")?];
            has_no_more(table, kind)?;
            scheme(set, shares, paths)
        }
        BuiltIn::Seal { .. } => {
            let padding = table.take("padding").map(|value| value.boolean());
            let padding = padding.transpose()?.unwrap_or(false);
            has_no_more(table, kind)?;
            Ok(BuiltIn::Seal { padding })
        }
    }
}

/// What a key is set to, and where.
type Number<'a> = Option<(u32, Value<'a>)>;

fn number<'a>(table: &mut Table<'a>, key: &'static str) -> Result<Number<'a>, Error> {
    let value = table.take(key);
    value
        .map(|value| Ok((value.integer(0..=u32::MAX)?, value)))
        .transpose()
}

/// As many shares as usual, all needed, where nothing else is said.
fn scheme([shares, needed]: [Number<'_>; 2], usual: u8, paths: usize) -> Result<BuiltIn, Error> {
    let most = paths.min(MAX_SHARES) as u32;
    let shares = match shares {
        None => usual,
        Some((shares, _)) if (2..=most).contains(&shares) => shares as u8,
        Some((shares, value)) => {
            return Err(value.error(Wrong::new(
                format!("is {shares}, where the file has {paths} paths"),
                "each share needs a path of its own, and there are two at least",
            )));
        }
    };
    let needed = match needed {
        None => shares,
        Some((needed, _)) if (2..=shares.into()).contains(&needed) => needed as u8,
        Some((needed, value)) => {
            return Err(value.error(Wrong::new(
                format!("is {needed}, of {shares} shares"),
                "2 at least, for one share would be the data, and no more than there are",
            )));
        }
    };
    Ok(BuiltIn::Share { needed, shares })
}

/// The device of a `[[bump]]` that is one, where there may be so many bumps in all.
fn device(
    mut table: Table<'_>,
    bumps: &[BumpConfig],
    most: usize,
    paths: &[PathConfig],
) -> Result<String, Error> {
    table.require("kind")?.one_of(&[(DEVICE, ())])?;
    let value = table.require("device")?;
    let device = value.parse(check::device)?;
    has_no_more(table, DEVICE)?;
    if let Some(other) = bumps.iter().find(|bump| bump.device() == Some(&device)) {
        let wrong = format!("is that of bump \"{}\" too", other.name);
        return Err(value.error(Wrong::bare(wrong)));
    }
    // Or what carries the bumps' data would go by a bump itself.
    let own = |path: &&PathConfig| path.interface.as_ref() == Some(&device);
    if let Some(path) = paths.iter().find(own) {
        let wrong = format!("is the interface of path \"{}\" too", path.name);
        let hint = "a device is a path or a bump, not both";
        return Err(value.error(Wrong::new(wrong, hint)));
    }
    if bumps.len() == most {
        let wrong = format!("this is one [[bump]] more than the {MOST_DEVICES} that have a mark");
        return Err(value.key_error(wrong, None));
    }
    Ok(device)
}

/// Refuses what is left of a table: keys of other kinds.
fn has_no_more(table: Table<'_>, kind: &str) -> Result<(), Error> {
    match table.rest().first() {
        Some(value) => Err(value.key_error(format!("is no key of kind \"{kind}\""), None)),
        None => Ok(()),
    }
}

/// The name of a bump out of these.
pub(crate) fn known(value: &Value<'_>, bumps: &[BumpConfig]) -> Result<String, Error> {
    value.parse(|text| {
        if bumps.iter().any(|bump| bump.name == text) {
            return Ok(text.to_owned());
        }
        let names: Vec<_> = bumps.iter().map(|bump| bump.name.as_str()).collect();
        let message = format!("\"{}\" is no known bump", text.escape_debug());
        Err(Wrong::new(message, meant(text, &names)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Source;

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
            let source = Source::new("a.toml", text);
            let mut root = source.root(&["bump"]).unwrap();
            let value = root.take("bump").unwrap();
            let tables = value.tables("[[bump]]", &keys()).unwrap();
            bumps_beside(&usual, tables, &[])
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
