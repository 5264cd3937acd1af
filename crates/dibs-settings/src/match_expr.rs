//! `match` of a rule: further matches of iptables, held to a list (docs/steering.md).
//!
//! The text ends up in a line of iptables-restore, so nothing in it may end that line, open
//! another chain or name a target.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Wrong, meant};

/// Modules, and what of them may be used. Only what can be told of an outgoing packet by its
/// headers, its socket or the clock.
const MODULES: &[(&str, &[&str])] = &[
    ("addrtype", &["--src-type", "--dst-type"]),
    ("cgroup", &["--path", "--cgroup"]),
    (
        "connbytes",
        &["--connbytes", "--connbytes-dir", "--connbytes-mode"],
    ),
    ("dscp", &["--dscp", "--dscp-class"]),
    ("iprange", &["--src-range", "--dst-range"]),
    ("length", &["--length"]),
    ("multiport", &["--sports", "--dports", "--ports"]),
    (
        "owner",
        &[
            "--uid-owner",
            "--gid-owner",
            "--socket-exists",
            "--suppl-groups",
        ],
    ),
    ("set", &["--match-set"]),
    (
        "time",
        &[
            "--datestart",
            "--datestop",
            "--timestart",
            "--timestop",
            "--monthdays",
            "--weekdays",
            "--kerneltz",
            "--contiguous",
        ],
    ),
    ("tos", &["--tos"]),
];

/// Arguments of iptables of the form `-m MODULE [!] --option value ...`, safe to put on its line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatchExpr(Vec<String>);

impl MatchExpr {
    /// The arguments one by one.
    pub fn args(&self) -> &[String] {
        &self.0
    }

    /// True if only connections of this host's own can fit: it asks for their socket.
    pub(crate) fn is_of_sockets(&self) -> bool {
        let modules = self.0.windows(2).filter(|words| words[0] == "-m");
        modules
            .into_iter()
            .any(|words| ["owner", "cgroup"].contains(&words[1].as_str()))
    }

    /// Reads the text of the file.
    ///
    /// # Errors
    /// The text is not of that form.
    pub fn parse(text: &str) -> Result<Self, Wrong> {
        if let Some(control) = text.chars().find(|c| c.is_control()) {
            return Err(Wrong::bare(format!(
                "has the control character {control:?}"
            )));
        }
        let mut options: &[&str] = &[];
        let mut modules = 0;
        let mut words = text.split(' ').filter(|word| !word.is_empty()).peekable();
        let mut args = Vec::new();
        while let Some(word) = words.next() {
            args.push(word.to_owned());
            match word {
                "-m" | "--match" => {
                    let Some(module) = words.next() else {
                        return Err(Wrong::bare("ends after -m"));
                    };
                    options = allowed_options(module)?;
                    modules += 1;
                    args.push(module.to_owned());
                }
                "!" => match words.peek() {
                    Some(next) if next.starts_with("--") => {}
                    _ => {
                        return Err(Wrong::bare(
                            "has \"!\" before something else than an option",
                        ));
                    }
                },
                option if option.starts_with('-') => {
                    if !options.contains(&option) {
                        return Err(Wrong::new(
                            format!("may not use \"{}\" here", option.escape_debug()),
                            match options {
                                [] => "name the module first, as in \"-m owner --uid-owner 1000\""
                                    .to_owned(),
                                known => meant(option, known),
                            },
                        ));
                    }
                }
                value => {
                    let fits = |c: char| c.is_ascii_alphanumeric() || "_.,:/=@-".contains(c);
                    if modules == 0 || !value.chars().all(fits) {
                        return Err(Wrong::new(
                            format!("cannot take \"{}\"", value.escape_debug()),
                            "write \"-m MODULE --option value\" without quotes",
                        ));
                    }
                }
            }
        }
        if modules == 0 {
            return Err(Wrong::new("is empty", "write \"-m MODULE --option value\""));
        }
        Ok(MatchExpr(args))
    }
}

impl fmt::Display for MatchExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(" "))
    }
}

fn allowed_options(module: &str) -> Result<&'static [&'static str], Wrong> {
    if let Some((_, options)) = MODULES.iter().find(|(name, _)| *name == module) {
        return Ok(options);
    }
    let names: Vec<_> = MODULES.iter().map(|(name, _)| *name).collect();
    Err(Wrong::new(
        format!("may not use the module \"{}\"", module.escape_debug()),
        meant(module, &names),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_matches() {
        for good in [
            "-m owner --uid-owner 1000",
            "-m multiport ! --dports 80,443,8000:8010 -m dscp --dscp-class EF",
            "--match iprange --dst-range 10.0.0.1-10.0.0.9",
            "-m set --match-set office dst",
            "-m owner --socket-exists",
        ] {
            assert_eq!(MatchExpr::parse(good).unwrap().to_string(), good);
        }
        let spaced = MatchExpr::parse("  -m  length --length 0:99 ").unwrap();
        assert_eq!(spaced.args(), ["-m", "length", "--length", "0:99"]);
    }

    #[test]
    fn refuses_all_else() {
        for bad in [
            "",
            "-m",
            "--uid-owner 0",
            "1000",
            "-j ACCEPT",
            "-m owner --uid-owner 0 -j ACCEPT",
            "-m owner --uid-owner 0 --jump ACCEPT",
            "-m owner --uid-owner 0 -g OTHER",
            "-m owner --uid-owner 0\nCOMMIT",
            "-m owner --uid-owner 0\r-A INPUT",
            "-m owner\t--uid-owner 0",
            "-m owner --uid-owner \"0\"",
            "-m owner --uid-owner $(id)",
            "-m owner --uid-owner=0",
            "-m owner ! 1000",
            "-m owner !",
            "-m bpf --bytecode 1",
            "-m comment --comment x",
            "-m owner -s 10.0.0.1",
            "-m owner --dports 80",
            "-m owner --uid-owner 0 -t nat",
        ] {
            assert!(MatchExpr::parse(bad).is_err(), "{bad:?}");
        }
    }
}
