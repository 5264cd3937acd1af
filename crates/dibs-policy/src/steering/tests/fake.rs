//! A host that takes commands word by word and refuses what a kernel would refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use dibs_settings::BumpId;

use crate::kernel::Kernel;
use crate::net::{Change, LinkState, NetChange, NetworkState, SYSCTLS};
use crate::table::Table;
use crate::{Command, CommandRunner, DeviceName, Error, Family, MarkLayout};

/// Chains of one family by table and name; built-in ones are always there.
pub(super) type Chains = BTreeMap<(Table, String), Vec<String>>;

/// The state of the fake host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) chains: BTreeMap<Family, Chains>,
    pub(super) network: NetworkState,
    /// ctmarks of the connections there are.
    pub(super) ctmarks: Vec<u32>,
}

/// A handle to the fake host; runner and kernel at once.
#[derive(Clone)]
pub(super) struct Fake(Arc<Mutex<Host>>);

pub(super) struct Host {
    pub(super) state: State,
    /// Called after each change.
    pub(super) check: fn(&State),
    /// Changes until one fails, if one should.
    pub(super) fail_after: Option<usize>,
}

const BUILT_IN: [(Table, &str); 9] = [
    (Table::Mangle, "PREROUTING"),
    (Table::Mangle, "INPUT"),
    (Table::Mangle, "FORWARD"),
    (Table::Mangle, "OUTPUT"),
    (Table::Mangle, "POSTROUTING"),
    (Table::Filter, "INPUT"),
    (Table::Filter, "FORWARD"),
    (Table::Filter, "OUTPUT"),
    (Table::Nat, "POSTROUTING"),
];

impl Fake {
    /// A host with these devices and nothing else.
    pub(super) fn new(devices: &[&str], check: fn(&State)) -> Self {
        let mut state = State::default();
        for family in Family::BOTH {
            let chains = BUILT_IN.map(|(table, name)| ((table, name.to_owned()), Vec::new()));
            state.chains.insert(family, chains.into());
        }
        for device in devices {
            let link = LinkState {
                up: device.starts_with("tun"),
                mtu: 1500,
                noqueue: false,
                sysctls: SYSCTLS
                    .iter()
                    .map(|(key, _)| (*key, "x".to_owned()))
                    .collect(),
            };
            state
                .network
                .links
                .insert(DeviceName::new(device).unwrap(), link);
        }
        Self(Arc::new(Mutex::new(Host {
            state,
            check,
            fail_after: None,
        })))
    }

    pub(super) fn host(&self) -> MutexGuard<'_, Host> {
        self.0.lock().unwrap()
    }
}

impl Host {
    /// Every change passes here.
    fn change(&mut self, change: impl FnOnce(&mut State) -> Result<(), String>) -> io::Result<()> {
        if let Some(left) = &mut self.fail_after {
            if *left == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            *left -= 1;
        }
        let mut next = self.state.clone();
        change(&mut next).unwrap_or_else(|refusal| panic!("refused: {refusal}"));
        self.state = next;
        (self.check)(&self.state);
        Ok(())
    }
}

impl CommandRunner for Fake {
    async fn run(&self, command: &Command) -> Result<String, Error> {
        let mut host = self.host();
        let arguments: Vec<&str> = command.arguments.iter().map(String::as_str).collect();
        let family = if command.program.starts_with("ip6") {
            Family::V6
        } else {
            Family::V4
        };
        match (command.program.as_str(), arguments.as_slice()) {
            ("iptables-save" | "ip6tables-save", ["-c"]) => Ok(save(&host.state.chains[&family])),
            ("iptables-restore", ["--version"]) => Ok("iptables-restore v1.8.9 (legacy)".into()),
            ("iptables-restore" | "ip6tables-restore", ["--noflush", "--wait"]) => host
                .change(|state| restore(state.chains.get_mut(&family).unwrap(), &command.input))
                .map(|()| String::new())
                .map_err(|error| Error::Run(command.to_string(), error)),
            (program, _) if program.contains("nft") || program.contains("legacy") => {
                Err(Error::NotInstalled(program.to_owned()))
            }
            _ => panic!("unknown command: {command}"),
        }
    }
}

fn save(chains: &Chains) -> String {
    let mut text = String::new();
    for table in Table::ALL {
        text += &format!("*{}\n", table.as_str());
        let ours = chains.iter().filter(|((of, _), _)| *of == table);
        for ((_, name), _) in ours.clone() {
            text += &format!(":{name} - [0:0]\n");
        }
        for ((_, name), rules) in ours {
            rules
                .iter()
                .for_each(|rule| text += &format!("[0:0] -A {name} {rule}\n"));
        }
        text += "COMMIT\n";
    }
    text
}

fn restore(chains: &mut Chains, input: &str) -> Result<(), String> {
    let mut table = None;
    for line in input.lines() {
        apply(chains, &mut table, line).map_err(|why| format!("{why}: {line}"))?;
    }
    if table.is_some() {
        Err("no COMMIT".into())
    } else {
        Ok(())
    }
}

fn apply(chains: &mut Chains, table: &mut Option<Table>, line: &str) -> Result<(), &'static str> {
    if let Some(name) = line.strip_prefix('*') {
        *table = Table::ALL.into_iter().find(|table| table.as_str() == name);
        return table.map(|_| ()).ok_or("no such table");
    }
    let of = table.ok_or("outside a table")?;
    let key = |name: &str| (of, name.to_owned());
    let words: Vec<&str> = line.split(' ').collect();
    match words.as_slice() {
        ["COMMIT"] => *table = None,
        [name, "-", "[0:0]"] if name.starts_with(":DIBS-") => {
            chains.insert(key(&name[1..]), Vec::new());
        }
        ["-A", name, rule @ ..] => {
            known_words(chains, of, rule)?;
            chains
                .get_mut(&key(name))
                .ok_or("no such chain")?
                .push(rule.join(" "));
        }
        ["-I", name, "1", rule @ ..] => {
            known_words(chains, of, rule)?;
            chains
                .get_mut(&key(name))
                .ok_or("no such chain")?
                .insert(0, rule.join(" "));
        }
        ["-D", name, rule @ ..] => {
            let rules = chains.get_mut(&key(name)).ok_or("no such chain")?;
            let rule = rule.join(" ");
            let at = rules
                .iter()
                .position(|found| *found == rule)
                .ok_or("no such rule")?;
            rules.remove(at);
        }
        ["-X", name] => {
            let used = chains
                .iter()
                .filter(|((table, _), _)| *table == of)
                .any(|(_, rules)| rules.iter().any(|rule| rule.ends_with(&format!(" {name}"))));
            if used || !chains.get(&key(name)).ok_or("no such chain")?.is_empty() {
                return Err("chain is in use");
            }
            chains.remove(&key(name));
        }
        _ => return Err("unknown line"),
    }
    Ok(())
}

/// Refuses options that no rule of ours has, and targets that are not there.
fn known_words(chains: &Chains, table: Table, words: &[&str]) -> Result<(), &'static str> {
    let options = [
        "-s",
        "-d",
        "-i",
        "-o",
        "-p",
        "-m",
        "-j",
        "-g",
        "!",
        "--mark",
        "--ctproto",
        "--tcp-flags",
        "--dport",
        "--sport",
        "--uid-owner",
        "--gid-owner",
        "--comment",
        "--set-xmark",
        "--restore-mark",
        "--nfmask",
        "--ctmask",
        "--dst-type",
        "--icmp-type",
        "--icmpv6-type",
        "--reject-with",
    ];
    let option = |word: &&&str| word.starts_with('-') || **word == "!";
    if words
        .iter()
        .filter(option)
        .any(|word| !options.contains(word))
    {
        return Err("unknown option");
    }
    let at = words
        .iter()
        .position(|word| matches!(*word, "-j" | "-g"))
        .ok_or("no target")?;
    let target = words.get(at + 1).ok_or("no target")?;
    let built_in = match table {
        Table::Mangle => ["RETURN", "DROP", "MARK", "CONNMARK"].as_slice(),
        Table::Filter => ["RETURN", "DROP", "REJECT"].as_slice(),
        Table::Nat => ["RETURN", "MASQUERADE"].as_slice(),
    };
    let there = built_in.contains(target) || chains.contains_key(&(table, (*target).to_owned()));
    if there { Ok(()) } else { Err("no such target") }
}

impl Kernel for Fake {
    async fn observe(&mut self, devices: &[DeviceName]) -> Result<NetworkState, Error> {
        let mut network = self.host().state.network.clone();
        network.links.retain(|name, _| devices.contains(name));
        Ok(network)
    }

    async fn change(&mut self, change: &NetChange) -> Result<(), Error> {
        let changed = self.host().change(|state| make(&mut state.network, change));
        changed.map_err(Error::netlink(change.to_string()))
    }

    async fn release_marks(&mut self, marks: MarkLayout, keep: &[BumpId]) -> Result<usize, Error> {
        let mut released = 0;
        let changed = self.host().change(|state| {
            for mark in &mut state.ctmarks {
                let kept = marks
                    .bump_of(*mark)
                    .is_some_and(|bump| keep.contains(&bump));
                let plain = marks.bump_of(*mark).is_none() && !keep.is_empty();
                if !kept && !plain && *mark & marks.mask() != 0 {
                    *mark &= !marks.mask();
                    released += 1;
                }
            }
            Ok(())
        });
        changed
            .map(|()| released)
            .map_err(Error::netlink("release marks"))
    }
}

/// What the kernel would do; removing or adding twice is refused, for the difference never asks for it.
fn make(network: &mut NetworkState, change: &NetChange) -> Result<(), String> {
    fn toggle<T: Ord + Clone>(set: &mut BTreeSet<T>, change: &Change, item: &T) -> bool {
        match change {
            Change::Add => set.insert(item.clone()),
            Change::Remove => set.remove(item),
        }
    }
    let up = |network: &NetworkState, device| {
        network
            .links
            .get(device)
            .is_some_and(|link: &LinkState| link.up)
    };
    let done = match change {
        NetChange::Address(how, address) => {
            up(network, &address.device) && toggle(&mut network.addresses, how, address)
        }
        NetChange::Route(how, route) => {
            let ready = route.device().is_none_or(|device| up(network, device));
            ready && toggle(&mut network.routes, how, route)
        }
        NetChange::Rule(how, rule) => toggle(&mut network.rules, how, rule),
        NetChange::Sysctl { device, key, value } => {
            let link = network.links.get_mut(device);
            link.map(|link| link.sysctls.insert(key, (*value).to_owned()))
                .is_some()
        }
        NetChange::Mtu(device, mtu) => network
            .links
            .get_mut(device)
            .map(|link| link.mtu = *mtu)
            .is_some(),
        NetChange::NoQueue(device) => network
            .links
            .get_mut(device)
            .map(|link| link.noqueue = true)
            .is_some(),
        NetChange::Up(device) => network
            .links
            .get_mut(device)
            .map(|link| link.up = true)
            .is_some(),
    };
    if done {
        Ok(())
    } else {
        Err(change.to_string())
    }
}
