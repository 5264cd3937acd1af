//! What the user says of how paths are used: role and limits of each, and the one that he prefers.

use dibs_settings::{Hint, Role, Scheduler};

use crate::amount::BadAmount;
use crate::error::Error;
use crate::table::{Table, Value, Wrong, meant};
use crate::{PathConfig, PathUsage, Prefer, Selection};

/// What `[prefer]` may say.
pub(crate) const PREFER: &[&str] = &["path", "weight", "delta"];

/// Probes that a path may be sent before they come more slowly.
const MOST_WEIGHT: u32 = 10_000;
/// So many times the least round trip are as good as any.
const MOST_DELTA: f64 = 1000.0;

impl Prefer {
    /// Refuses a weight or delta that `[prefer]` could not have, in one sentence.
    pub fn check(weight: u32, delta: f64) -> Result<(), String> {
        if weight > MOST_WEIGHT {
            return Err(format!("weight has to be within 0 and {MOST_WEIGHT}"));
        }
        if !(1.0..=MOST_DELTA).contains(&delta) {
            return Err(format!("delta has to be within 1 and {MOST_DELTA}"));
        }
        Ok(())
    }
}

pub(crate) fn scheduler(value: &Value<'_>) -> Result<Scheduler, Error> {
    value.one_of(&Scheduler::ALL.map(|one| (one.name(), one)))
}

/// The scheduler that a rule has for what it selects.
pub(crate) fn scheduler_of_rule(
    value: Option<Value<'_>>,
    selection: &Selection,
) -> Result<Option<Scheduler>, Error> {
    let Some(value) = value else {
        return Ok(None);
    };
    if let Some(key) = selection.shows_elsewhere() {
        return Err(value.key_error(
            format!(
                "a rule with {key} cannot have a scheduler: who shares out data over the paths sees addresses and \
                 ports alone"
            ),
            Some("name it by ports, addresses, time".to_owned()),
        ));
    }
    scheduler(&value).map(Some)
}

/// The keys of a `[[path]]` that say what it is for.
pub(crate) fn usage(table: &mut Table<'_>) -> Result<PathUsage, Error> {
    fn amount<T: std::str::FromStr<Err = BadAmount>>(
        value: Option<Value<'_>>,
    ) -> Result<Option<T>, Error> {
        let parse = |value: Value<'_>| {
            value.parse(|text| {
                text.parse().map_err(|bad| match bad {
                    BadAmount::Form(hint) => {
                        Wrong::new(format!("cannot be \"{}\"", text.escape_debug()), hint)
                    }
                    BadAmount::Range(range) => Wrong::bare(format!("has to be within {range}")),
                })
            })
        };
        value.map(parse).transpose()
    }
    let role = table.take("role");
    let role = role.map(|value| value.one_of(&Role::ALL.map(|one| (one.name(), one))));
    Ok(PathUsage {
        role: role.transpose()?.unwrap_or_default(),
        rate: amount(table.take("rate"))?,
        volume: amount(table.take("volume"))?,
    })
}

/// The section `[prefer]`.
pub(crate) fn prefer(section: Value<'_>, paths: &[PathConfig]) -> Result<Prefer, Error> {
    let mut table = section.table("[prefer]", PREFER)?;
    let name = table.require("path")?;
    let path = name.string()?.to_owned();
    let Some(named) = paths.iter().find(|known| known.name == path) else {
        let names: Vec<_> = paths.iter().map(|path| path.name.as_str()).collect();
        let hint = meant(&path, &names);
        return Err(name.error(Wrong::new(
            format!("\"{}\" is no path", path.escape_debug()),
            hint,
        )));
    };
    if named.usage.role == Role::Never {
        return Err(name.error(Wrong::new(
            format!("\"{path}\" is never used"),
            "give it another role, or prefer another path",
        )));
    }
    let weight = table.take("weight");
    let weight = weight.map(|value| value.integer(0..=MOST_WEIGHT));
    let delta = table.take("delta");
    let delta = delta.map(|value| value.number(1.0..=MOST_DELTA));
    Ok(Prefer {
        path,
        weight: weight.transpose()?.unwrap_or(Hint::WEIGHT),
        delta: delta.transpose()?.unwrap_or(Hint::DELTA),
    })
}
