//! `check FILE`

use std::path::Path;

use anyhow::Result;
use dibs_config::{Config, Error};
use serde_json::json;

use crate::doctor;
use crate::init::interfaces::{self, Interface};
use crate::output::{say, show, warn};
use crate::units::count;

pub(crate) fn run(file: &Path, json: bool) -> Result<()> {
    let name = file.display().to_string();
    let checked = dibs_config::load(file).and_then(|config| {
        config.check_carried()?;
        Ok(config)
    });
    match checked {
        Ok(config) => {
            let mut warnings = config.warnings();
            let off = config.daemon.unforwarded(doctor::sysctl).into_iter();
            warnings.extend(off.map(|key| {
                format!("this host does not forward, because {key} is 0: run sysctl -w {key}=1")
            }));
            warnings.extend(missing(&config, &interfaces::list()?));
            let answer = json!({ "ok": true, "file": name, "warnings": warnings });
            show(json, &answer, || {
                format!("{name} is valid: {}\n", summary(&config))
            })?;
            if !json {
                warn(&warnings);
            }
            Ok(())
        }
        Err(error) => {
            let answer = match &error {
                Error::Read { reason, .. } => json!({
                    "ok": false, "file": name, "line": null, "column": null,
                    "message": reason, "hint": null,
                }),
                Error::Invalid(fault) => json!({
                    "ok": false, "file": name, "line": fault.line, "column": fault.column,
                    "message": fault.message, "hint": fault.hint,
                }),
            };
            if json {
                show(true, &answer, String::new)?;
            } else if let Error::Invalid(fault) = &error {
                say(&fault.excerpt());
            }
            Err(error.into())
        }
    }
}

/// Warnings of paths by an interface that this host does not have. One that comes later is taken then, so it is no fault.
fn missing(config: &Config, interfaces: &[Interface]) -> Vec<String> {
    let named = config.paths.iter().filter_map(|path| {
        let name = path.interface.as_deref()?;
        let is_there = interfaces.iter().any(|known| known.is_called(name));
        (!is_there && path.pattern().is_none()).then_some((&path.name, name))
    });
    let sentence = |(path, name): (&String, &str)| {
        format!("path {path} waits for an interface {name}: this host has none of that name now")
    };
    named.map(sentence).collect()
}

fn summary(config: &Config) -> String {
    [
        count(config.paths.len(), "path"),
        count(config.peers.len(), "peer"),
        count(config.rules.len(), "rule"),
    ]
    .join(", ")
}
