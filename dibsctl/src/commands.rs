//! The commands, one by one.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use clap::CommandFactory;
use clap::error::ErrorKind;
use dibs_control::{
    Changed, Client, ClientError, Match, NewRule, PathChange, Selector, Skipped, Terms,
};
use serde::Serialize;

use crate::args::{
    Args, BumpCommand, Command, ConnCommand, PathCommand, PeerCommand, RuleCommand, SELECT,
};
use crate::output::{show, unix_now, warn};
use crate::table::Table;
use crate::{check, cleanup, doctor, init, keys, leave, program, render, speed, top, units};

pub(crate) fn run(args: Args) -> Result<()> {
    let json = args.json;
    let connect = || Client::connect(&args.socket);
    let now = unix_now();
    match args.command {
        Command::Status => {
            let status = connect()?.status()?;
            show(json, &status, || render::status(&status, now))
        }
        Command::Conn(ConnCommand::List) => {
            let conns = connect()?.conns()?;
            show_list(json, &conns, "connection to a peer", || {
                render::conns(&conns, now)
            })
        }
        Command::Enable { selector, bump } => {
            let selector = selected(selector.into(), &["enable"]);
            let changed = telling(connect()?, |client| client.enable(selector, bump))?;
            show_changed(json, &changed, now)
        }
        Command::Disable { selector, force } => {
            let selector = selected(selector.into(), &["disable"]);
            let changed = telling(connect()?, |client| client.disable(selector, force))?;
            show_changed(json, &changed, now)?;
            // A user who expects plain, and reads the exit status alone, is not to be wrong about any of them.
            match &changed.skipped[..] {
                [] => Ok(()),
                skipped => bail!(
                    "{} did not move: {}",
                    units::count(skipped.len(), "connection"),
                    reason(skipped)
                ),
            }
        }
        Command::Rule(command) => rule(json, connect, command),
        Command::Path(command) => path(json, connect()?, command),
        Command::Peer(PeerCommand::List) => {
            let peers = connect()?.peers()?;
            show_list(json, &peers, "peer", || render::peers(&peers, now))
        }
        Command::Peer(PeerCommand::Remove { name, force }) => {
            connect()?.remove_peer(name.clone(), force)?;
            show(json, &serde_json::json!({}), || {
                format!("peer {name} is removed\n")
            })
        }
        Command::Bump(BumpCommand::List) => {
            let bumps = connect()?.bumps()?;
            show_list(json, &bumps, "bump", || render::bumps(&bumps))
        }
        Command::Events => follow(json, connect()?),
        Command::Top(options) => top::run(&options, &args.socket, json),
        Command::Speed(options) => speed::run(&options, &args.socket, json),
        Command::Init(wishes) => init::run(&wishes, json),
        Command::Check { file } => check::run(&file, json),
        Command::Eavesdrop(_) => program::eavesdrop(),
        Command::Doctor { config } => doctor::run(config, &args.socket, json),
        Command::Cleanup { force } => {
            cleanup::run(&args.socket, force)?;
            show(json, &serde_json::json!({}), || {
                "nothing of dibs is left in the kernel\n".into()
            })
        }
        Command::Leave { file, force } => leave::run(&file, &args.socket, force, json),
        Command::Demo(demo) => program::demo(&demo),
        Command::Genkey => keys::genkey(),
        Command::Pubkey => keys::pubkey(),
        Command::Genpsk => keys::genpsk(),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "dibsctl", &mut script);
            Ok(io::stdout().write_all(&script)?)
        }
        Command::Man { directory } => man(&directory),
    }
}

/// Selector of the command line of this command, which ends here if it selects nothing.
fn selected(selector: Selector, command: &[&str]) -> Selector {
    match selector {
        Selector::Match(none) if none == Match::default() => {
            let kind = ErrorKind::MissingRequiredArgument;
            let mut all = Args::command();
            let named = command.iter().try_fold(&mut all, |of, name| {
                of.find_subcommand_mut(name).ok_or(name)
            });
            let named = named.expect("it was just parsed");
            named.error(kind, SELECT).exit()
        }
        selector => selector,
    }
}

fn show_list<T: Serialize>(
    json: bool,
    list: &[T],
    noun: &str,
    human: impl FnOnce() -> Table,
) -> Result<()> {
    show(json, &list, || {
        if list.is_empty() {
            format!("no {noun}\n")
        } else {
            human().to_string()
        }
    })
}

/// Shows, makes or deletes rules.
fn rule(
    json: bool,
    connect: impl Fn() -> Result<Client, ClientError>,
    command: RuleCommand,
) -> Result<()> {
    match command {
        RuleCommand::Add {
            class,
            terms,
            bump,
            require,
            prefer,
            priority,
            scheduler,
        } => {
            let terms = Terms::from(*terms);
            // With terms alone the rest is all connections.
            let selector = match terms == Terms::default() {
                true => selected(class.into(), &["rule", "add"]),
                false => match class.into() {
                    Selector::Match(none) if none == Match::default() => Selector::All,
                    selector => selector,
                },
            };
            let rule = NewRule {
                selector,
                terms,
                bump,
                require,
                prefer,
                priority,
                scheduler,
            };
            let made = telling(connect()?, |client| client.add_rule(rule))?;
            show(json, &made, || render::made(&made))?;
            if !json {
                warn(&made.warnings);
            }
            Ok(())
        }
        RuleCommand::List => {
            let rules = connect()?.rules()?;
            show_list(json, &rules, "rule", || render::rules(&rules))
        }
        RuleCommand::Del { id, force } => {
            let gone = telling(connect()?, |client| client.delete_rule(id, force))?;
            show(json, &gone, || render::gone(&gone))?;
            match &gone.kept[..] {
                [] => Ok(()),
                kept => bail!(
                    "rule {id} is deleted, but {} of it did not move: {}; dibsctl disable --force moves them, and may break them",
                    units::count(kept.len(), "connection"),
                    reason(kept)
                ),
            }
        }
    }
}

/// Shows the paths, or changes how they are used.
fn path(json: bool, mut client: Client, command: PathCommand) -> Result<()> {
    let change = match command {
        PathCommand::List => {
            let paths = client.paths()?;
            return show_list(json, &paths, "path", || render::paths(&paths));
        }
        PathCommand::Scheduler { name: None } => {
            let now = client.preferences()?;
            return show(json, &now, || render::scheduler(&now));
        }
        PathCommand::Scheduler { name: Some(name) } => PathChange::Scheduler { name },
        PathCommand::Prefer {
            name: path,
            weight,
            delta,
        } => PathChange::Prefer {
            path,
            weight,
            delta,
        },
        PathCommand::Unprefer => PathChange::Unprefer,
        PathCommand::Role { name: path, role } => PathChange::Role { path, role },
        PathCommand::Limit {
            name: path,
            rate,
            volume,
        } => PathChange::Limit { path, rate, volume },
        PathCommand::Reset => PathChange::Reset,
    };
    let now = client.change_paths(change.clone())?;
    show(json, &now, || render::path_change(&change, &now))?;
    if !json {
        warn(&now.warnings);
    }
    Ok(())
}

/// Changes connections or rules, and says meanwhile on a terminal how far that is.
fn telling<T>(
    mut client: Client,
    change: impl FnOnce(&mut Client) -> Result<T, ClientError>,
) -> Result<T> {
    const CLEAR: &str = "\r\x1b[K";
    let terminal = io::stderr().is_terminal();
    if terminal {
        client.on_progress(|done, of| match of {
            0 => eprint!("{CLEAR}waiting for dibsd, which gives a peer 15 s to answer"),
            _ => eprint!("{CLEAR}{done} of {of} connections"),
        });
    }
    let changed = change(&mut client);
    if terminal {
        eprint!("{CLEAR}");
    }
    changed.map_err(|error| match error {
        ClientError::Timeout { .. } => {
            anyhow!("{error}; it continues what it began: see dibsctl conn list")
        }
        error => error.into(),
    })
}

fn show_changed(json: bool, changed: &Changed, now: f64) -> Result<()> {
    show(json, changed, || render::changed(changed, now))?;
    if !json {
        warn(&changed.warnings);
    }
    match &changed.skipped[..] {
        [] => Ok(()),
        skipped if changed.connections.is_empty() => bail!(
            "none of {} moved: {}",
            units::count(skipped.len(), "connection"),
            reason(skipped)
        ),
        _ => Ok(()),
    }
}

/// Reason why connections did not move, of which there is one at least; the first one, and how many have another.
fn reason(skipped: &[Skipped]) -> String {
    let first = &skipped[0].reason;
    match skipped.iter().filter(|it| it.reason != *first).count() {
        0 => first.clone(),
        others => format!("{first}; {others} for other reasons, as the list says"),
    }
}

fn follow(json: bool, client: Client) -> Result<()> {
    let mut out = io::stdout().lock();
    for event in client.events()? {
        let event = event?;
        let line = if json {
            serde_json::to_string(&event)?
        } else {
            render::event(&event)
        };
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    Ok(())
}

fn man(directory: &Path) -> Result<()> {
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    pages(&command, directory)
        .with_context(|| format!("cannot write the manual to {}", directory.display()))
}

/// Sections of each page of the manual behind those of its command.
const ENDING: &str = "\
.SH FILES
/etc/dibs/dibsd.toml, /etc/dibs/private.key, /run/dibs/dibsd.sock
.SH \"EXIT STATUS\"
0 for success, 1 if the command was refused or failed, with one sentence on standard error, 2 for a wrong command line.
.SH \"SEE ALSO\"
dibsctl(1), dibsd(8), dibsd.toml(5), /usr/share/doc/dibs
";

/// Writes the page of a command and those of its subcommands.
fn pages(command: &clap::Command, directory: &Path) -> io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        pages(sub, directory)?;
    }
    let man = clap_mangen::Man::new(command.clone());
    let mut page = Vec::new();
    man.render(&mut page)?;
    let text = String::from_utf8_lossy(&page).replacen(".SH EXTRA\nExamples:", ".SH EXAMPLES", 1);
    std::fs::write(directory.join(man.get_filename()), text + ENDING)
}
