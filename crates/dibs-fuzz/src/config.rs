//! The configuration file and the state file.

use dibs_config::{Config, Error};
use dibsd::rulebook::rules;
use dibsd::rulebook::state_file::Saved;

use crate::input::Input;

const NAME: &str = "fuzz.toml";

/// The first byte chooses the file.
pub fn config(data: &[u8]) {
    let mut input = Input::new(data);
    let state = input.flag();
    let Ok(text) = std::str::from_utf8(input.rest()) else {
        return;
    };
    if state {
        state_file(text);
    } else {
        configuration(text);
    }
}

fn configuration(text: &str) {
    match dibs_config::parse(NAME, text) {
        Ok(config) => accepted(&config, text),
        Err(error) => refused(&error, text),
    }
}

/// An error names a place in the file, and can be shown.
fn refused(error: &Error, text: &str) {
    let Error::Invalid(invalid) = error else {
        panic!("nothing was read from a file: {error}");
    };
    let lines = text.matches('\n').count() + 1;
    assert!(
        (1..=lines).contains(&invalid.line) && invalid.column >= 1,
        "{}:{} of {lines} lines",
        invalid.line,
        invalid.column
    );
    let shown = error.to_string();
    let place = format!("{NAME}:{}:{}: ", invalid.line, invalid.column);
    assert!(shown.starts_with(&place), "{shown:?}");
    assert!(!invalid.message.is_empty());
    assert!(
        !shown.chars().any(char::is_control),
        "a terminal is shown no control characters: {shown:?}"
    );
    let excerpt = invalid.excerpt();
    assert!(excerpt.lines().count() <= 2, "{excerpt:?}");
    assert!(
        !excerpt
            .chars()
            .any(|c| c.is_control() && c != '\n' && c != '\t')
    );
}

/// What is accepted can be used without a further look (docs/steering.md).
fn accepted(config: &Config, text: &str) {
    if let Err(error) = config.check_carried() {
        refused(&error, text);
    }
    for warning in config.warnings() {
        assert!(!warning.is_empty());
    }
    assert!((0.0..=1.0).contains(&config.daemon.trusted_share));
    assert!(config.daemon.mark_mask.count_ones() >= 6);
    let peers = &config.peers;
    for (at, peer) in peers.iter().enumerate() {
        let endpoints = peer.endpoints.iter();
        for (path, _) in endpoints {
            assert!(config.paths.iter().any(|p| p.name == *path));
        }
        for other in &peers[..at] {
            assert!(other.name != peer.name && other.public_key != peer.public_key);
        }
    }
    for rule in &config.rules {
        assert!(config.bump(&rule.bump).is_some());
        let _ = rules::classes_of(rule);
        let args = rule
            .selection
            .match_expr()
            .into_iter()
            .flat_map(|expr| expr.args());
        for arg in args {
            assert!(!arg.is_empty());
            assert!(
                arg.chars()
                    .all(|c| c.is_ascii_graphic() && !"'\"\\`$;".contains(c)),
                "it stands on a line of iptables-restore: {arg:?}"
            );
            assert!(!matches!(
                arg.as_str(),
                "-j" | "--jump" | "-g" | "--goto" | "-t" | "--table"
            ));
        }
    }
}

/// What is understood is written back the same.
fn state_file(text: &str) {
    if let Ok(saved) = Saved::from_json(text) {
        assert_eq!(Saved::from_json(&saved.to_json()).ok(), Some(saved));
    }
}
