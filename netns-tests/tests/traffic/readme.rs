//! README.md's quick start, as it stands there: each command, and what it prints. And the list of counters in docs/counters.md.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use netns_tests::{Net, Setup, isolated, programs};
use nix::sys::signal::Signal;

const README: &str = include_str!("../../../README.md");
const COUNTERS: &str = include_str!("../../../docs/counters.md");

/// Commands of all consoles in a text, each with its hosts and the lines that it prints there.
fn commands(text: &str) -> Vec<(&str, &str, Vec<&str>)> {
    let mut found: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    let consoles = text.split("```console\n").skip(1);
    for line in consoles.flat_map(|rest| rest.split("```").next().unwrap_or_default().lines()) {
        match line.split_once("$ sudo ") {
            Some((hosts, command)) => found.push((hosts, command, Vec::new())),
            None => found.last_mut().expect("a command").2.push(line),
        }
    }
    found
}

/// Lines that a command prints, of which a document shows some, in this order, without what "..." stands for.
fn ensure_printed(printed: &str, shown: &[&str]) -> Result<()> {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut lines = printed.lines().map(words);
    for line in shown.iter().filter(|line| **line != "...") {
        let line = words(line);
        let there = match line.strip_suffix("...") {
            Some(start) => lines.any(|printed| printed.starts_with(start.trim_end())),
            None => lines.any(|printed| printed == line),
        };
        ensure!(
            there,
            "\"{line}\" is not, or not there, in what came:\n{printed}"
        );
    }
    Ok(())
}

/// Runs one of `dibsctl` on a host that is called as the document calls it; files are in `/run/dibs`.
fn dibsctl(net: &Net, host: &str, command: &str, tokens: &mut Vec<String>) -> Result<String> {
    let (command, token) = match command.split_once(" dibs1,name=") {
        Some((command, name)) => {
            let start = format!("dibs1,name={},", name.trim_end_matches(",..."));
            let token = tokens.iter().find(|token| token.starts_with(&start));
            (
                command,
                token
                    .with_context(|| format!("nobody printed {start}"))?
                    .as_str(),
            )
        }
        None => (command, ""),
    };
    let file = command
        .starts_with("init")
        .then_some("--config /run/dibs/dibsd.toml");
    let program = programs::built("dibsctl");
    let line = format!(
        "echo {host} >/proc/sys/kernel/hostname; exec {} {command} {token} {} 2>&1",
        program.display(),
        file.unwrap_or_default(),
    );
    let node = if host == "a" { &net.a } else { &net.b };
    let printed = node.host.shell(&format!("unshare --uts sh -c '{line}'"))?;
    tokens.extend(
        printed
            .split_whitespace()
            .filter(|word| word.starts_with("dibs1,"))
            .map(str::to_owned),
    );
    Ok(printed.replace("/run/dibs/", "/etc/dibs/"))
}

#[test]
fn the_quick_start() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            for node in [&net.a, &net.b] {
                for file in ["dibsd.toml", "private.key"] {
                    std::fs::remove_file(node.directory().join(file))?;
                }
            }
            let (mut tokens, mut talk) = (Vec::new(), None);
            let all = commands(README);
            ensure!(all.len() > 10, "the quick start has few commands: {all:?}");
            for (hosts, command, shown) in all {
                match command.split_once(' ').context("a command")? {
                    ("dibsctl", command) => {
                        let printed = dibsctl(net, hosts, command, &mut tokens)?;
                        ensure_printed(&printed, &shown).with_context(|| command.to_owned())?;
                    }
                    ("systemctl", "enable --now dibs-guard dibsd") => {
                        net.start()?;
                        talk = Some(net.talk(5432)?);
                    }
                    ("systemctl", "disable --now dibsd dibs-guard") => {
                        net.a.stop(Signal::SIGTERM)?
                    }
                    // What the trials of the package do.
                    ("apt", "install ./dibs_*.deb") => {}
                    _ => anyhow::bail!("what is \"{command}\" here?"),
                }
                if let Some(talk) = &talk {
                    talk.advance(64 << 10).with_context(|| command.to_owned())?;
                }
            }
            talk.context("the daemons were never started")?.finish()
        })
    });
}

/// Names of the first column of the tables of docs/counters.md, up to its list of events.
fn listed() -> BTreeSet<&'static str> {
    let (counters, _) = COUNTERS
        .split_once("\n## Events")
        .expect("a list of events");
    let rows = counters.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split('`').next()).collect()
}

#[test]
fn all_counters_are_listed() {
    isolated(|| {
        Setup::new().run(|net| {
            let status = net.a.ctl(&["status"])?;
            let counters = status["counters"].as_object().context("counters")?;
            let counted: BTreeSet<_> = counters.keys().map(String::as_str).collect();
            let listed = listed();
            let unlisted: Vec<_> = counted.difference(&listed).collect();
            let unknown: Vec<_> = listed.difference(&counted).collect();
            ensure!(
                unlisted.is_empty() && unknown.is_empty(),
                "docs/counters.md lacks {unlisted:?}, and nothing counts {unknown:?}"
            );
            Ok(())
        })
    });
}
