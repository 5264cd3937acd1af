//! The printer for nftables: a rule as expressions of nf_tables. By hand because [`nft`](crate::nft) is.

use ipnet::IpNet;
use std::net::IpAddr;

use dibs_settings::Term;

use super::{Bits, Match, Rule, Verdict, label};
use crate::desired::{Hours, Ports};
use crate::nft::{Attributes, Change, Kind};
use crate::{DeviceName, Family};

/// The verdict register, and the one where other values begin.
const VERDICT: u32 = 0;
const REGISTER: u32 = 1;
/// Registers of four bytes; the first of them is where [`REGISTER`] begins.
const WORDS: u32 = 8;

/// How long after its last packet an untracked connection is known, in milliseconds: for as long as Linux answers a
/// SYN again and again.
const UNTRACKED_FOR: u64 = 120_000;

const TCP: [u8; 1] = [6];

/// A rule as the kernel is told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Printed {
    label: String,
    expressions: Attributes,
    /// It ends in a drop.
    pub(crate) drops: bool,
}

/// Keys of the `meta` expression.
const MARK: u32 = 3;
const IN_NAME: u32 = 6;
const OUT_NAME: u32 = 7;
const UID: u32 = 10;
const GID: u32 = 11;
const FAMILY: u32 = 15;
const PROTOCOL: u32 = 16;
const HOUR: u32 = 32;

/// Keys of the `ct` expression: of the connection that a packet belongs to, or that an ICMP error is about.
const CT_STATE: u32 = 0;
const CT_DIRECTION: u32 = 1;
const CT_STATUS: u32 = 2;
const CT_MARK: u32 = 3;
const CT_PROTOCOL: u32 = 10;
/// As its first packet had it: ports, and addresses of IPv4 and IPv6, of the source; each of the destination is one more.
const CT_PORT: u32 = 11;
const CT_ADDRESS: [u32; 2] = [19, 21];
/// IPS_DST_NAT.
const DESTINATION_CHANGED: u32 = 1 << 5;
/// IPS_SRC_NAT, likewise.
const SOURCE_CHANGED: u32 = 1 << 4;

/// Where an offset counts from.
const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;

impl Printed {
    /// In nft(8)'s listing; differs where the rule does.
    pub(crate) fn comment(&self) -> String {
        // FNV-1a.
        let hash = self.expressions.0.iter();
        let hash = hash.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
        format!("{} #{hash:016x}", self.label)
    }

    /// What it consists of.
    #[cfg(test)]
    pub(crate) fn expressions(&self) -> &[u8] {
        &self.expressions.0
    }

    /// The message that adds it to a chain.
    pub(crate) fn make(&self, table: &str, chain: &str) -> Change {
        let comment = self.comment();
        let length = u8::try_from(comment.len() + 1).expect("labels are short");
        let mut data = vec![0, length];
        data.extend(comment.as_bytes());
        data.push(0);
        let attributes = Attributes::default().text(1, table).text(2, chain);
        let attributes = attributes.nested(4, self.expressions.clone());
        Change {
            kind: Kind::NewRule,
            attributes: attributes.bytes(7, &data),
        }
    }
}

impl Rule {
    /// Whether it is another rule for each family though it names none.
    pub(crate) fn is_of_a_family(&self) -> bool {
        fn of_family(asked: &Match) -> bool {
            match asked {
                Match::AsCalled(part) => of_family(part),
                Match::Among(_) | Match::AmongBack(_) | Match::Term(Term::Dscp(_)) => true,
                _ => false,
            }
        }
        self.matches.iter().any(of_family)
            || matches!(
                self.verdict,
                Verdict::Remember(_) | Verdict::KeepSource | Verdict::Masquerade
            )
    }

    /// As nftables is told it, of one family or of both; none where nftables cannot say it.
    pub(crate) fn nftables(&self, family: Option<Family>) -> Option<Printed> {
        let mut told = Expressions::default();
        if let Some(family) = family {
            told.meta(FAMILY).compare(&[number(family)], true);
        }
        for asked in &self.matches {
            told.asked(asked, family)?;
        }
        told.verdict(&self.verdict, family)?;
        let id = self.matches.iter().find_map(|asked| match asked {
            Match::Class(id) => Some(label(*id)),
            _ => None,
        });
        Some(Printed {
            label: id.unwrap_or_else(|| "dibs".to_owned()),
            drops: matches!(
                self.verdict,
                Verdict::Drop | Verdict::Take { .. } | Verdict::Restore(_)
            ),
            expressions: told.0,
        })
    }
}

#[derive(Default)]
struct Expressions(Attributes);

impl Expressions {
    fn asked(&mut self, asked: &Match, family: Option<Family>) -> Option<()> {
        match asked {
            Match::From(net) => self.prefix(*net, false),
            Match::To(net) => self.prefix(*net, true),
            Match::In(device, is) => self.name(IN_NAME, device, *is),
            Match::Out(device, is) => self.name(OUT_NAME, device, *is),
            Match::Tcp { sport, dport } => self.tcp(*sport, *dport),
            Match::Owner { uid, gid } => {
                for (key, id) in [(UID, uid), (GID, gid)] {
                    if let Some(id) = id {
                        self.meta(key).compare(&id.to_ne_bytes(), true);
                    }
                }
            }
            Match::Term(Term::Dscp(dscp)) => self.dscp(family?, *dscp),
            Match::Hours(hours) => self.hours(*hours),
            Match::Mark(bits) => self.meta(MARK).masked(*bits),
            Match::CtMark(bits) => self.tracked(CT_MARK).masked(*bits),
            Match::OfTcp => self.tracked(CT_PROTOCOL).compare(&TCP, true),
            Match::Begins(is) => {
                // FIN, SYN, RST, ACK; of these SYN alone.
                self.meta(PROTOCOL).compare(&TCP, true);
                let flags = self.payload(REGISTER, TRANSPORT, 13, 1);
                flags.bitwise(&[0b1_0111], &[0]).compare(&[0b10], *is);
            }
            Match::Resets(is) => {
                self.meta(PROTOCOL).compare(&TCP, true);
                let flags = self.payload(REGISTER, TRANSPORT, 13, 1);
                flags.bitwise(&[0b100], &[0]).compare(&[0b100], *is);
            }
            Match::Translated { answers } => {
                let changed = Bits::are(DESTINATION_CHANGED, DESTINATION_CHANGED);
                self.tracked(CT_STATUS).masked(changed);
                self.tracked(CT_DIRECTION)
                    .compare(&[u8::from(*answers)], true);
            }
            Match::SourceChanged(is) => {
                let value = if *is { SOURCE_CHANGED } else { 0 };
                self.tracked(CT_STATUS)
                    .masked(Bits::are(SOURCE_CHANGED, value));
            }
            Match::AsCalled(part) => return self.as_called(part, family),
            Match::Class(_) => {}
            Match::Term(_) | Match::Iptables(_) => return None,
            Match::Among(set) => self.ends(family?, false).among(set.name(family?)),
            Match::AmongBack(set) => self.ends(family?, true).among(set.name(family?)),
            // NF_CT_STATE_UNTRACKED_BIT.
            Match::Untracked => self.tracked(CT_STATE).masked(Bits::are_not(1 << 6, 0)),
            Match::NoWayBack => {
                // NFTA_FIB_DREG, _RESULT (a device), _FLAGS (source address, by this device, whether at all).
                self.add("fib", numbers(&[REGISTER, 1, 0b10_1001]));
                self.compare(&[0], true);
            }
        }
        Some(())
    }

    /// Ends of the connection, of its answers as the caller knows them.
    fn as_called(&mut self, part: &Match, family: Option<Family>) -> Option<()> {
        match part {
            Match::From(net) => self.called_prefix(*net, true),
            Match::To(net) => self.called_prefix(*net, false),
            Match::Tcp { sport, dport } => {
                self.tracked(CT_PROTOCOL).compare(&TCP, true);
                for (ports, key) in [(dport, CT_PORT), (sport, CT_PORT + 1)] {
                    if let Some(ports) = ports {
                        self.first_packet(REGISTER, key).ports(*ports);
                    }
                }
            }
            Match::Among(set) => {
                let family = family?;
                let source = CT_ADDRESS[usize::from(family == Family::V6)];
                let words = if family == Family::V4 { 1 } else { 4 };
                self.tracked(CT_PROTOCOL).compare(&TCP, true);
                self.first_packet(WORDS, source + 1)
                    .first_packet(WORDS + words, CT_PORT + 1)
                    .first_packet(WORDS + words + 1, source)
                    .first_packet(WORDS + 2 * words + 1, CT_PORT)
                    .among(set.name(family));
            }
            _ => return None,
        }
        Some(())
    }

    fn called_prefix(&mut self, prefix: IpNet, destination: bool) {
        if prefix.prefix_len() > 0 {
            let address = CT_ADDRESS[usize::from(prefix.addr().is_ipv6())];
            self.first_packet(REGISTER, address + u32::from(destination))
                .within(prefix);
        }
    }

    /// Loads what the first packet of the connection had.
    fn first_packet(&mut self, register: u32, key: u32) -> &mut Self {
        // NFTA_CT_DREG, _KEY, _DIRECTION.
        self.add("ct", numbers(&[register, key]).bytes(3, &[0]))
    }

    fn verdict(&mut self, verdict: &Verdict, family: Option<Family>) -> Option<()> {
        match verdict {
            Verdict::Return => self.ends_in(-5, None),
            Verdict::Drop | Verdict::Take { .. } => self.drop(),
            Verdict::Goto(chain) => self.ends_in(-4, Some(&chain.to_lowercase())),
            Verdict::Restore(mask) => {
                self.tracked(CT_MARK).masked(Bits::are_not(*mask, 0));
                self.drop();
            }
            Verdict::SetCtMark(bits) => {
                // NFTA_CT_KEY, _SREG.
                let store = Attributes::default().number(2, CT_MARK).number(4, REGISTER);
                let kept = (!bits.mask).to_ne_bytes();
                self.tracked(CT_MARK)
                    .bitwise(&kept, &bits.value.to_ne_bytes())
                    .add("ct", store);
            }
            Verdict::Remember(set) => {
                // NFTA_DYNSET_SET_NAME, _OP (update), _SREG_KEY, _TIMEOUT.
                let data = Attributes::default()
                    .text(1, set.name(family?))
                    .number(3, 1)
                    .number(4, REGISTER)
                    .bytes(6, &UNTRACKED_FOR.to_be_bytes());
                self.ends(family?, true).add("dynset", data);
                self.ends_in(-5, None);
            }
            Verdict::KeepSource => {
                // NFTA_NAT_TYPE (source), _FAMILY, _REG_ADDR_MIN.
                let data = numbers(&[0, u32::from(number(family?)), REGISTER]);
                self.address(REGISTER, family?, false).add("nat", data);
            }
            Verdict::Masquerade => drop(self.add("masq", Attributes::default())),
            Verdict::Jump(_) | Verdict::SetMark(_) | Verdict::Reject(_) => return None,
        }
        Some(())
    }

    fn add(&mut self, name: &str, data: Attributes) -> &mut Self {
        // NFTA_LIST_ELEM; NFTA_EXPR_NAME, NFTA_EXPR_DATA.
        let expression = Attributes::default().text(1, name).nested(2, data);
        self.0 = std::mem::take(&mut self.0).nested(1, expression);
        self
    }

    fn meta(&mut self, key: u32) -> &mut Self {
        self.add("meta", numbers(&[REGISTER, key]))
    }

    fn tracked(&mut self, key: u32) -> &mut Self {
        // NFTA_CT_DREG, _KEY.
        self.add("ct", numbers(&[REGISTER, key]))
    }

    fn compare(&mut self, value: &[u8], equal: bool) {
        let data = numbers(&[REGISTER, u32::from(!equal)]);
        self.add("cmp", data.nested(3, data_value(value)));
    }

    /// `register & mask ^ flip`.
    fn bitwise(&mut self, mask: &[u8], flip: &[u8]) -> &mut Self {
        let length = u32::try_from(mask.len()).expect("an address at most");
        let data = numbers(&[REGISTER, REGISTER, length]);
        let data = data.nested(4, data_value(mask)).nested(5, data_value(flip));
        self.add("bitwise", data)
    }

    fn masked(&mut self, bits: Bits) {
        self.bitwise(&bits.mask.to_ne_bytes(), &[0; 4])
            .compare(&bits.value.to_ne_bytes(), bits.is);
    }

    fn tcp(&mut self, sport: Option<Ports>, dport: Option<Ports>) {
        self.meta(PROTOCOL).compare(&TCP, true);
        for (ports, offset) in [(sport, 0), (dport, 2)] {
            let Some(ports) = ports else { continue };
            self.payload(REGISTER, TRANSPORT, offset, 2).ports(ports);
        }
    }

    fn ports(&mut self, ports: Ports) {
        let (first, last) = (ports.first.to_be_bytes(), ports.last.to_be_bytes());
        match first == last {
            true => self.compare(&first, true),
            false => self.range(&first, &last, false),
        }
    }

    /// Six bits of the second byte (IPv4), or across the first two (IPv6).
    fn dscp(&mut self, family: Family, dscp: u8) {
        match family {
            Family::V4 => self
                .payload(REGISTER, NETWORK, 1, 1)
                .bitwise(&[0xfc], &[0])
                .compare(&[dscp << 2], true),
            Family::V6 => self
                .payload(REGISTER, NETWORK, 0, 2)
                .bitwise(&0x0fc0_u16.to_be_bytes(), &[0; 2])
                .compare(&(u16::from(dscp) << 6).to_be_bytes(), true),
        }
    }

    /// The kernel counts the seconds of the day in UTC.
    fn hours(&mut self, hours: Hours) {
        let (first, last) = (hours.start, hours.last());
        // Past midnight: outside of what lies between.
        let (outside, from, to) = match first <= last {
            true => (false, first, last),
            false => (true, last + 1, first - 1),
        };
        // NFTA_BYTEORDER_SREG, _DREG, _OP (to network order), _LEN, _SIZE.
        let order = numbers(&[REGISTER, REGISTER, 1, 4, 4]);
        let seconds = self.meta(HOUR).add("byteorder", order);
        seconds.range(&from.to_be_bytes(), &to.to_be_bytes(), outside);
    }

    /// Whether the register lies between two values, in network order, or outside of them.
    fn range(&mut self, from: &[u8], to: &[u8], outside: bool) {
        // NFTA_RANGE_SREG, _OP, _FROM_DATA, _TO_DATA.
        let data = numbers(&[REGISTER, u32::from(outside)]);
        let data = data.nested(3, data_value(from)).nested(4, data_value(to));
        self.add("range", data);
    }

    fn payload(&mut self, register: u32, base: u32, offset: u32, length: u32) -> &mut Self {
        self.add("payload", numbers(&[register, base, offset, length]))
    }

    fn name(&mut self, key: u32, device: &DeviceName, is: bool) {
        let mut name = device.as_str().as_bytes().to_vec();
        name.resize(16, 0);
        self.meta(key).compare(&name, is);
    }

    fn prefix(&mut self, prefix: IpNet, destination: bool) {
        if prefix.prefix_len() == 0 {
            return;
        }
        self.address(REGISTER, Family::of(prefix.addr()), destination)
            .within(prefix);
    }

    fn within(&mut self, prefix: IpNet) {
        let address = bytes(prefix.addr());
        self.bitwise(&bytes(prefix.netmask()), &vec![0; address.len()])
            .compare(&address, true);
    }

    fn address(&mut self, register: u32, family: Family, destination: bool) -> &mut Self {
        let (source, length) = match family {
            Family::V4 => (12, 4),
            Family::V6 => (8, 16),
        };
        let offset = if destination { source + length } else { source };
        self.payload(register, NETWORK, offset, length)
    }

    /// Loads what names a TCP connection, as the keys of the sets have it, of a packet of this end or of the
    /// far one.
    fn ends(&mut self, family: Family, back: bool) -> &mut Self {
        let address = match family {
            Family::V4 => 1,
            Family::V6 => 4,
        };
        let (local, remote) = if back { (2, 0) } else { (0, 2) };
        self.meta(PROTOCOL).compare(&TCP, true);
        self.address(WORDS, family, back)
            .payload(WORDS + address, TRANSPORT, local, 2)
            .address(WORDS + address + 1, family, !back)
            .payload(WORDS + 2 * address + 1, TRANSPORT, remote, 2)
    }

    fn among(&mut self, set: &str) {
        let data = Attributes::default().text(1, set).number(2, REGISTER);
        self.add("lookup", data);
    }

    fn drop(&mut self) {
        self.add("counter", Attributes::default());
        self.ends_in(0, None);
    }

    fn ends_in(&mut self, code: i32, chain: Option<&str>) {
        // NFTA_IMMEDIATE_DREG, _DATA; NFTA_DATA_VERDICT; NFTA_VERDICT_CODE, _CHAIN.
        let verdict = Attributes::default().bytes(1, &code.to_be_bytes());
        let verdict = match chain {
            Some(chain) => verdict.text(2, chain),
            None => verdict,
        };
        let data = Attributes::default().nested(2, verdict);
        let data = Attributes::default().number(1, VERDICT).nested(2, data);
        self.add("immediate", data);
    }
}

/// The attributes from the first on.
fn numbers(values: &[u32]) -> Attributes {
    let attributes = values.iter().zip(1..);
    attributes.fold(Attributes::default(), |all, (value, kind)| {
        all.number(kind, *value)
    })
}

/// NFTA_DATA_VALUE.
fn data_value(value: &[u8]) -> Attributes {
    Attributes::default().bytes(1, value)
}

fn number(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
