//! Whether other programs write the bits of the firewall mark that are dibs'.

use dibs_config::Config;

use crate::doctor::finding::Finding;
use crate::doctor::host::Tables;
use crate::doctor::netfilter;

const CHECK: &str = "marks";

/// By the rules of iptables.
pub(crate) fn judge(tables: &Tables, config: Option<&Config>) -> Option<Finding> {
    if tables.forbidden {
        return Some(Finding::needs_root(CHECK));
    }
    let ours = config.map_or(0x3f00_0000, |config| config.daemon.mark_mask);
    let saved = tables.of(false).chain(tables.of(true));
    let mut lines = saved.flat_map(netfilter::others);
    Some(match lines.find(|(_, line)| written(line) & ours != 0) {
        Some((table, line)) => Finding::warning(
            CHECK,
            format!("\"{line}\" in table {table} writes bits of the mask {ours:#x}"),
            "give that rule a mask without these bits, or set another mark_mask in [daemon]",
        ),
        None => Finding::fine(CHECK, format!("no other rule writes {ours:#x}")),
    })
}

/// The bits of a mark that a rule writes.
fn written(line: &str) -> u32 {
    let words: Vec<&str> = line.split(' ').collect();
    let value = |key: &str| {
        let at = words.iter().position(|word| *word == key)?;
        words.get(at + 1).copied()
    };
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let marks = value("-j").is_some_and(|target| target == "MARK" || target == "CONNMARK");
    if !marks {
        return 0;
    }
    let set = value("--set-xmark").or(value("--set-mark"));
    if let Some(set) = set {
        let (value, mask) = set.split_once('/').unwrap_or((set, "0xffffffff"));
        return number(value).unwrap_or(0) | number(mask).unwrap_or(u32::MAX);
    }
    if words.contains(&"--restore-mark") || words.contains(&"--save-mark") {
        let of = |key| value(key).and_then(number).unwrap_or(u32::MAX);
        return of("--nfmask") & of("--ctmask");
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    fn outcome(rule: &str) -> Outcome {
        let saved = format!("*mangle\n-A OUTPUT {rule}\nCOMMIT\n");
        let tables = Tables {
            nft: [Some(saved), None],
            ..Tables::default()
        };
        judge(&tables, None).unwrap().outcome
    }

    #[test]
    fn masks_are_looked_at() {
        for (rule, expected) in [
            ("-j MARK --set-xmark 0x1/0xffffffff", Outcome::Warning),
            ("-j MARK --set-xmark 0x40000/0xff0000", Outcome::Ok),
            ("-j MARK --set-xmark 0x1000000/0x0", Outcome::Warning),
            (
                "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
                Outcome::Warning,
            ),
            (
                "-j CONNMARK --save-mark --nfmask 0xff0000 --ctmask 0xff0000",
                Outcome::Ok,
            ),
            ("-m mark --mark 0x1000000/0xffffffff -j ACCEPT", Outcome::Ok),
            ("-j MARK --set-xmark", Outcome::Ok),
        ] {
            assert_eq!(outcome(rule), expected, "{rule}");
        }
    }
}
