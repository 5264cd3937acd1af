//! The bumps: those that `dibs_core` carries, as each `[[bump]]` sets them, and devices.

use std::collections::BTreeMap;

use dibs_core::bump::{Bump, KINDS, Kind, Settings};

use crate::check;
use crate::error::Error;
use crate::table::{Table, Value, Wrong, meant};
use crate::{BumpConfig, BumpKind, DEVICE, PathConfig};

/// Bumps are numbered in four bits: 0 is none, 15 the daemon's own sockets, below 8 what is built in.
const MOST_DEVICES: usize = 7;

/// What a `[[bump]]` may say.
pub(crate) fn keys() -> Vec<&'static str> {
    let mut keys = vec!["name", "kind", "device"];
    for key in KINDS.iter().flat_map(|kind| [kind.numbers, kind.flags]) {
        keys.extend(key);
    }
    keys
}

/// All that exist without being listed, as they are set, then the devices.
pub(crate) fn bumps(
    tables: Vec<Table<'_>>,
    paths: &[PathConfig],
) -> Result<Vec<BumpConfig>, Error> {
    let usual = |kind: &Kind| BumpConfig {
        name: kind.name.to_owned(),
        kind: BumpKind::BuiltIn(kind.usual(paths.len())),
    };
    let mut bumps: Vec<_> = KINDS.iter().map(usual).collect();
    let mut listed = [false; KINDS.len()];
    for mut table in tables {
        let value = table.require("name")?;
        let name = value.parse(check::name)?;
        let built_in = KINDS.iter().position(|kind| kind.name == name);
        match built_in {
            Some(at) if KINDS[at].has_settings() => {
                if std::mem::replace(&mut listed[at], true) {
                    return Err(value.error(Wrong::bare("is listed twice")));
                }
                let bump = settings(table, &value, &KINDS[at], paths.len())?;
                bumps[at].kind = BumpKind::BuiltIn(bump);
            }
            None if name != "plain" => {
                if bumps.iter().any(|bump| bump.name == name) {
                    let wrong = format!("\"{name}\" is taken by another");
                    return Err(value.error(Wrong::bare(wrong)));
                }
                let device = device(table, &bumps, paths)?;
                bumps.push(BumpConfig {
                    name,
                    kind: BumpKind::Device(device),
                });
            }
            _ => {
                let names: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
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
fn settings(
    mut table: Table<'_>,
    name: &Value<'_>,
    kind: &Kind,
    paths: usize,
) -> Result<Bump, Error> {
    table.require("kind")?.one_of(&[(kind.name, ())])?;
    let mut settings = Settings {
        paths,
        ..Settings::default()
    };
    let mut set = BTreeMap::new();
    for key in kind.numbers {
        if let Some(value) = table.take(key) {
            settings.numbers.insert(key, value.integer(0..=u32::MAX)?);
            set.insert(*key, value);
        }
    }
    for key in kind.flags {
        if let Some(value) = table.take(key) {
            if value.boolean()? {
                settings.flags.insert(key);
            }
            set.insert(*key, value);
        }
    }
    has_no_more(table, kind.name)?;
    kind.bump(&settings).map_err(|unfit| {
        let wrong = Wrong::new(unfit.reason, unfit.hint);
        set.get(unfit.key).unwrap_or(name).error(wrong)
    })
}

/// The device of a `[[bump]]` that is one.
fn device(
    mut table: Table<'_>,
    bumps: &[BumpConfig],
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
    if bumps.len() == KINDS.len() + MOST_DEVICES {
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
