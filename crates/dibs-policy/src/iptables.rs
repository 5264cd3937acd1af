//! iptables as text: reading iptables-save, writing iptables-restore.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::table::{Table, reason};

/// Role of a chain: guards are installed before markers and removed after them, so that no marked packet is ever
/// without a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Drops or refuses.
    Guard,
    /// Sets marks.
    Marker,
}

impl Role {
    /// The role of one of our chains, found by name in the kernel.
    pub(crate) fn of(name: &str) -> Self {
        let is_guard = { Table::ALL.iter() }.any(|table| reason(*table, name).is_some());
        match is_guard || name == "DIBS-PREROUTING" {
            true => Role::Guard,
            false => Role::Marker,
        }
    }
}

/// One of our chains as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its table.
    pub table: Table,
    /// Its name, which begins with `DIBS-`.
    pub name: String,
    /// The built-in chain whose first rule jumps here, if any.
    pub hook: Option<&'static str>,
    /// Its rules, without `-A NAME`.
    pub rules: Vec<String>,
}

/// Our chains, and what refers to them, as one family's iptables-save shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Our chains with their rules (without `-A NAME`).
    pub chains: BTreeMap<(Table, String), Vec<CountedRule>>,
    /// Rules of other chains that jump to one of ours.
    pub jumps: Vec<Jump>,
}

/// A rule and how many packets have matched it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CountedRule {
    /// The rule, without `-A NAME`.
    pub rule: String,
    /// Packets that matched.
    pub packets: u64,
}

/// A rule outside our chains that jumps to one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jump {
    /// Its table.
    pub table: Table,
    /// The chain it stands in.
    pub chain: String,
    /// The rule, without `-A CHAIN`.
    pub rule: String,
    /// Our chain that it jumps to.
    pub target: String,
    /// True if no rule of others stands before it in its chain.
    pub first: bool,
}

pub(crate) const PREFIX: &str = "DIBS-";

impl Tables {
    /// Reads what `iptables-save -c` printed. Lines that are not about us are skipped.
    pub fn parse(text: &str) -> Self {
        let mut tables = Self::default();
        let mut table = None;
        // Chains that have rules of others so far.
        let mut others: BTreeSet<(Table, String)> = BTreeSet::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = Table::ALL
                    .into_iter()
                    .find(|table| table.as_str() == name.trim());
                continue;
            }
            let Some(table) = table else { continue };
            if let Some(declared) = line.strip_prefix(':') {
                let name = declared.split(' ').next().unwrap_or_default();
                if name.starts_with(PREFIX) {
                    tables.chains.entry((table, name.to_owned())).or_default();
                }
                continue;
            }
            let (packets, rest) = counter(line);
            let Some((chain, rule)) = rest.strip_prefix("-A ").and_then(|r| r.split_once(' '))
            else {
                continue;
            };
            if chain.starts_with(PREFIX) {
                let counted = CountedRule {
                    rule: rule.to_owned(),
                    packets,
                };
                tables
                    .chains
                    .entry((table, chain.to_owned()))
                    .or_default()
                    .push(counted);
            } else if let Some(target) = target(rule) {
                tables.jumps.push(Jump {
                    table,
                    chain: chain.to_owned(),
                    rule: rule.to_owned(),
                    target: target.to_owned(),
                    first: !others.contains(&(table, chain.to_owned())),
                });
            } else {
                others.insert((table, chain.to_owned()));
            }
        }
        tables
    }

    /// True if nothing of ours is there.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.jumps.is_empty()
    }

    pub(crate) fn rules(&self, chain: &Chain) -> Option<Vec<&str>> {
        let rules = self.chains.get(&(chain.table, chain.name.clone()))?;
        Some(rules.iter().map(|counted| counted.rule.as_str()).collect())
    }

    fn jumps_to<'a>(&'a self, chain: &'a Chain) -> impl Iterator<Item = &'a Jump> + 'a {
        self.jumps.iter().filter(|jump| {
            jump.table == chain.table
                && jump.target == chain.name
                && Some(jump.chain.as_str()) == chain.hook
        })
    }

    fn jump_stands(&self, chain: &Chain) -> bool {
        let mut jumps = self.jumps_to(chain);
        chain.hook.is_none()
            || (jumps
                .next()
                .is_some_and(|jump| jump.first && jump.rule == plain_jump(chain))
                && jumps.next().is_none())
    }
}

fn plain_jump(chain: &Chain) -> String {
    format!("-j {}", chain.name)
}

fn counter(line: &str) -> (u64, &str) {
    let counted = line.strip_prefix('[').and_then(|rest| {
        let (counts, rule) = rest.split_once("] ")?;
        Some((counts.split_once(':')?.0.parse().ok()?, rule))
    });
    counted.unwrap_or((0, line))
}

/// The chain of ours that a rule jumps or goes to.
fn target(rule: &str) -> Option<&str> {
    let mut words = rule.split(' ').rev();
    let target = words.next()?;
    let how = words.next()?;
    (matches!(how, "-j" | "-g") && target.starts_with(PREFIX)).then_some(target)
}

/// The input of iptables-restore that turns the chains of `role` from `now` into `wanted`: only those
/// that differ, whole tables at a time. `accepted` tells how the kernel shows a chain that it was given.
pub(crate) fn install(
    wanted: &[Chain],
    now: &Tables,
    role: Role,
    accepted: impl Fn(&Chain, &[&str]) -> bool,
) -> String {
    let mut input = String::new();
    for table in Table::ALL {
        let ours: Vec<&Chain> = wanted
            .iter()
            .filter(|c| c.table == table && Role::of(&c.name) == role)
            .collect();
        let differs = |chain: &Chain| {
            now.rules(chain)
                .is_none_or(|rules| !accepted(chain, &rules))
        };
        let mut lines = String::new();
        for chain in ours.iter().filter(|chain| differs(chain)) {
            line(&mut lines, format_args!(":{} - [0:0]", chain.name));
        }
        for chain in ours.iter().filter(|chain| differs(chain)) {
            for rule in &chain.rules {
                line(&mut lines, format_args!("-A {} {rule}", chain.name));
            }
        }
        for chain in ours.iter().filter(|chain| !now.jump_stands(chain)) {
            for jump in now.jumps_to(chain) {
                line(&mut lines, format_args!("-D {} {}", jump.chain, jump.rule));
            }
            if let Some(hook) = chain.hook {
                line(
                    &mut lines,
                    format_args!("-I {hook} 1 {}", plain_jump(chain)),
                );
            }
        }
        commit(&mut input, table, &lines);
    }
    input
}

/// The input of iptables-restore that removes the chains of `role` that are in `now` and not in
/// `wanted`, and every jump to them.
pub(crate) fn remove(wanted: &[Chain], now: &Tables, role: Role) -> String {
    let mut input = String::new();
    for table in Table::ALL {
        let stale = |name: &str| {
            Role::of(name) == role && !wanted.iter().any(|c| c.table == table && c.name == name)
        };
        let names: Vec<&String> = now
            .chains
            .keys()
            .filter(|(of, name)| *of == table && stale(name))
            .map(|(_, name)| name)
            .collect();
        let mut lines = String::new();
        for name in &names {
            line(&mut lines, format_args!(":{name} - [0:0]"));
        }
        for jump in now
            .jumps
            .iter()
            .filter(|jump| jump.table == table && stale(&jump.target))
        {
            line(&mut lines, format_args!("-D {} {}", jump.chain, jump.rule));
        }
        for name in &names {
            line(&mut lines, format_args!("-X {name}"));
        }
        commit(&mut input, table, &lines);
    }
    input
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("writing to a String cannot fail");
}

fn commit(input: &mut String, table: Table, lines: &str) {
    if !lines.is_empty() {
        line(input, format_args!("*{}", table.as_str()));
        input.push_str(lines);
        line(input, format_args!("COMMIT"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "\
# Generated by iptables-save v1.8.9
*raw
:DIBS-NOT-OURS - [0:0]
-A OUTPUT -j DIBS-NOT-OURS
COMMIT
*mangle
:OUTPUT ACCEPT [12:900]
:DIBS-OUTPUT - [0:0]
:DIBS-OLD - [0:0]
[3:180] -A OUTPUT -p tcp -j ACCEPT
[2:120] -A OUTPUT -j DIBS-OUTPUT
[7:420] -A DIBS-OUTPUT -m mark --mark 0xf000000/0xf000000 -j RETURN
[0:0] -A OUTPUT -m comment --comment \"see DIBS-OLD\" -g DIBS-OLD
COMMIT
";

    fn output() -> Chain {
        Chain {
            table: Table::Mangle,
            name: "DIBS-OUTPUT".into(),
            hook: Some("OUTPUT"),
            rules: vec!["-m mark --mark 0xf000000/0xf000000 -j RETURN".into()],
        }
    }

    fn same(chain: &Chain, rules: &[&str]) -> bool {
        chain.rules == rules
    }

    #[test]
    fn save_is_read_with_counters_and_jumps() {
        let tables = Tables::parse(SAVED);
        let counted = &tables.chains[&(Table::Mangle, "DIBS-OUTPUT".to_owned())];
        assert_eq!(counted[0].packets, 7);
        assert_eq!(tables.chains.len(), 2);
        let jumps: Vec<_> = tables
            .jumps
            .iter()
            .map(|j| (j.target.as_str(), j.first))
            .collect();
        assert_eq!(jumps, [("DIBS-OUTPUT", false), ("DIBS-OLD", false)]);
    }

    #[test]
    fn a_jump_that_is_not_first_is_moved_and_a_right_chain_left_alone() {
        let input = install(&[output()], &Tables::parse(SAVED), Role::Marker, same);
        assert_eq!(
            input,
            "*mangle\n-D OUTPUT -j DIBS-OUTPUT\n-I OUTPUT 1 -j DIBS-OUTPUT\nCOMMIT\n"
        );
    }

    #[test]
    fn stale_chains_go_with_every_jump_to_them() {
        let input = remove(&[output()], &Tables::parse(SAVED), Role::Marker);
        assert_eq!(
            input,
            "*mangle\n:DIBS-OLD - [0:0]\n\
             -D OUTPUT -m comment --comment \"see DIBS-OLD\" -g DIBS-OLD\n-X DIBS-OLD\nCOMMIT\n"
        );
        assert_eq!(remove(&[output()], &Tables::parse(SAVED), Role::Guard), "");
    }

    #[test]
    fn what_stands_needs_no_input() {
        let saved = ":x\n*mangle\n:DIBS-OUTPUT - [0:0]\n-A OUTPUT -j DIBS-OUTPUT\n\
                     -A DIBS-OUTPUT -m mark --mark 0xf000000/0xf000000 -j RETURN\n";
        assert_eq!(
            install(&[output()], &Tables::parse(saved), Role::Marker, same),
            ""
        );
    }

    proptest::proptest! {
        #[test]
        fn any_text_can_be_read(text in ".{0,300}", lines in "([*:\\[A-Z0-9\\] -]{0,30}\n){0,12}") {
            Tables::parse(&text);
            Tables::parse(&format!("*mangle\n{lines}"));
        }
    }
}
