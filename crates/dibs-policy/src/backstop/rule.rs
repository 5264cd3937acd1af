//! One rule: matches and what follows from them, as nf_tables has them.

use std::fmt::Write as _;
use std::net::IpAddr;

use super::rules::TABLE;
use crate::desired::{BumpRoute, ClassRule, Hours, Ports, Protocol};
use crate::nft::{Attributes, Change, Kind};
use crate::{Desired, Family, Prefix};

/// The verdict register, and the one where other values begin.
const VERDICT: u32 = 0;
const REGISTER: u32 = 1;
/// Registers of four bytes; the first of them is where [`REGISTER`] begins.
const WORDS: u32 = 8;

/// How long after its last packet an untracked connection is known, in milliseconds: for as long as Linux answers a
/// SYN again and again.
const UNTRACKED_FOR: u64 = 120_000;

/// Matches and what follows from them, as expressions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    label: String,
    expressions: Attributes,
    /// It ends in a drop.
    pub(super) drops: bool,
}

/// Keys of the `meta` expression.
#[derive(Clone, Copy)]
pub(super) enum Meta {
    Mark = 3,
    InName = 6,
    OutName = 7,
    Uid = 10,
    Gid = 11,
    Family = 15,
    Protocol = 16,
    Hour = 32,
}

/// Keys of the `ct` expression: of the connection that a packet belongs to, or that an ICMP error is about.
#[derive(Clone, Copy)]
enum Tracked {
    State = 0,
    Mark = 3,
    Protocol = 10,
}

impl Rule {
    pub(super) fn new(label: impl Into<String>) -> Self {
        Self {
            label: label.into(),
            expressions: Attributes::default(),
            drops: false,
        }
    }

    pub(super) fn of_class(class: &ClassRule, family: Family, destination: Prefix) -> Self {
        let mut rule = Self::new(format!("dibs-rule-{}", class.id)).family(family);
        let protocol = match class.protocol {
            Protocol::Tcp => Some(libc::IPPROTO_TCP),
            Protocol::Udp => Some(libc::IPPROTO_UDP),
            Protocol::Any => None,
        };
        if let Some(protocol) = protocol {
            rule = rule.protocol(protocol);
        }
        rule = rule.destination(destination);
        if let Some(source) = class.source {
            rule = rule.prefix(source, false);
        }
        for (ports, offset) in [(class.sport, 0), (class.dport, 2)] {
            if let Some(ports) = ports {
                rule = rule.ports(ports, offset);
            }
        }
        for (key, id) in [(Meta::Uid, class.uid), (Meta::Gid, class.gid)] {
            if let Some(id) = id {
                rule = rule.meta(key).compare(&id.to_ne_bytes(), true);
            }
        }
        if let Some(interface) = &class.interface {
            rule = rule.name(Meta::OutName, interface.as_str());
        }
        if let Some(dscp) = class.dscp {
            rule = rule.dscp(family, dscp);
        }
        match class.hours {
            Some(hours) => rule.hours(hours),
            None => rule,
        }
    }

    /// In nft(8)'s listing; differs where the rule does.
    pub(super) fn comment(&self) -> String {
        // FNV-1a.
        let hash = self.expressions.0.iter();
        let hash = hash.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
        let mut comment = self.label.clone();
        write!(comment, " #{hash:016x}").expect("writing to a String cannot fail");
        comment
    }

    pub(super) fn make(&self, chain: &str) -> Change {
        let comment = self.comment();
        let length = u8::try_from(comment.len() + 1).expect("labels are short");
        let mut data = vec![0, length];
        data.extend(comment.as_bytes());
        data.push(0);
        let attributes = Attributes::default().text(1, TABLE).text(2, chain);
        let attributes = attributes.nested(4, self.expressions.clone());
        Change {
            kind: Kind::NewRule,
            attributes: attributes.bytes(7, &data),
        }
    }

    fn expression(mut self, name: &str, data: Attributes) -> Self {
        // NFTA_LIST_ELEM; NFTA_EXPR_NAME, NFTA_EXPR_DATA.
        let expression = Attributes::default().text(1, name).nested(2, data);
        self.expressions = self.expressions.nested(1, expression);
        self
    }

    fn meta(self, key: Meta) -> Self {
        let data = Attributes::default().number(1, REGISTER);
        self.expression("meta", data.number(2, key as u32))
    }

    fn compare(self, value: &[u8], equal: bool) -> Self {
        let data = Attributes::default()
            .number(1, REGISTER)
            .number(2, u32::from(!equal))
            .nested(3, Attributes::default().bytes(1, value));
        self.expression("cmp", data)
    }

    /// `register & mask ^ flip`.
    fn bitwise(self, mask: &[u8], flip: &[u8]) -> Self {
        let length = u32::try_from(mask.len()).expect("an address at most");
        let data = Attributes::default()
            .number(1, REGISTER)
            .number(2, REGISTER)
            .number(3, length)
            .nested(4, Attributes::default().bytes(1, mask))
            .nested(5, Attributes::default().bytes(1, flip));
        self.expression("bitwise", data)
    }

    /// Six bits of the second byte (IPv4), or across the first two (IPv6).
    fn dscp(self, family: Family, dscp: u8) -> Self {
        match family {
            Family::V4 => self
                .payload(REGISTER, Base::Network, 1, 1)
                .bitwise(&[0xfc], &[0])
                .compare(&[dscp << 2], true),
            Family::V6 => self
                .payload(REGISTER, Base::Network, 0, 2)
                .bitwise(&0x0fc0_u16.to_be_bytes(), &[0; 2])
                .compare(&(u16::from(dscp) << 6).to_be_bytes(), true),
        }
    }

    /// The kernel counts the seconds of the day in UTC.
    fn hours(self, hours: Hours) -> Self {
        let (first, last) = (hours.start, hours.last());
        // Past midnight: outside of what lies between.
        let (outside, from, to) = match first <= last {
            true => (false, first, last),
            false => (true, last + 1, first - 1),
        };
        // NFTA_BYTEORDER_SREG, _DREG, _OP (to network order), _LEN, _SIZE.
        let order = Attributes::default()
            .number(1, REGISTER)
            .number(2, REGISTER)
            .number(3, 1)
            .number(4, 4)
            .number(5, 4);
        self.meta(Meta::Hour).expression("byteorder", order).range(
            &from.to_be_bytes(),
            &to.to_be_bytes(),
            outside,
        )
    }

    fn ports(self, ports: Ports, offset: u32) -> Self {
        let loaded = self.payload(REGISTER, Base::Transport, offset, 2);
        let (first, last) = (ports.first.to_be_bytes(), ports.last.to_be_bytes());
        match first == last {
            true => loaded.compare(&first, true),
            false => loaded.range(&first, &last, false),
        }
    }

    /// Whether the register lies between two values, in network order, or outside of them.
    fn range(self, from: &[u8], to: &[u8], outside: bool) -> Self {
        // NFTA_RANGE_SREG, _OP, _FROM_DATA, _TO_DATA.
        let value = |value: &[u8]| Attributes::default().bytes(1, value);
        let data = Attributes::default()
            .number(1, REGISTER)
            .number(2, u32::from(outside))
            .nested(3, value(from))
            .nested(4, value(to));
        self.expression("range", data)
    }

    fn payload(self, register: u32, base: Base, offset: u32, length: u32) -> Self {
        let data = Attributes::default()
            .number(1, register)
            .number(2, base as u32)
            .number(3, offset)
            .number(4, length);
        self.expression("payload", data)
    }

    fn masked(self, mask: u32, value: u32, equal: bool) -> Self {
        self.bitwise(&mask.to_ne_bytes(), &[0; 4])
            .compare(&value.to_ne_bytes(), equal)
    }

    pub(super) fn mark(self, mask: u32, value: u32, equal: bool) -> Self {
        self.meta(Meta::Mark).masked(mask, value, equal)
    }

    fn tracked(self, key: Tracked) -> Self {
        let data = Attributes::default().number(1, REGISTER);
        self.expression("ct", data.number(2, key as u32))
    }

    pub(super) fn ct_mark(self, mask: u32, value: u32, equal: bool) -> Self {
        self.tracked(Tracked::Mark).masked(mask, value, equal)
    }

    /// A packet of a TCP connection, or an ICMP error about one.
    pub(super) fn of_tcp(self) -> Self {
        let protocol = u8::try_from(libc::IPPROTO_TCP).expect("a byte in the header");
        self.tracked(Tracked::Protocol).compare(&[protocol], true)
    }

    /// NF_CT_STATE_UNTRACKED_BIT.
    pub(super) fn untracked(self) -> Self {
        self.tracked(Tracked::State).masked(1 << 6, 0, false)
    }

    fn set_ct_mark(self, mask: u32, value: u32) -> Self {
        let key = Tracked::Mark as u32;
        let store = Attributes::default().number(2, key).number(4, REGISTER);
        self.tracked(Tracked::Mark)
            .bitwise(&(!mask).to_ne_bytes(), &value.to_ne_bytes())
            .expression("ct", store)
    }

    /// A TCP connection that is on no bump and not plain by choice goes to this one.
    pub(super) fn follows(self, desired: &Desired, bump: &BumpRoute) -> Self {
        let marks = desired.marks;
        self.of_tcp()
            .ct_mark(marks.bump_mask() | marks.override_bit(), 0, true)
            .set_ct_mark(marks.bump_mask(), marks.bump(bump.id))
    }

    pub(super) fn device(self, key: Meta, bump: &BumpRoute) -> Self {
        self.name(key, bump.device.as_str())
    }

    pub(super) fn name(self, key: Meta, device: &str) -> Self {
        let mut name = device.as_bytes().to_vec();
        name.resize(16, 0);
        self.meta(key).compare(&name, true)
    }

    pub(super) fn family(self, family: Family) -> Self {
        self.meta(Meta::Family).compare(&[number(family)], true)
    }

    pub(super) fn protocol(self, protocol: i32) -> Self {
        let protocol = u8::try_from(protocol).expect("a byte in the header");
        self.meta(Meta::Protocol).compare(&[protocol], true)
    }

    pub(super) fn destination(self, prefix: Prefix) -> Self {
        self.prefix(prefix, true)
    }

    pub(super) fn prefix(self, prefix: Prefix, destination: bool) -> Self {
        if prefix.length() == 0 {
            return self;
        }
        let address = bytes(prefix.address());
        let all = IpAddr::from([0xff; 16]);
        let ones = match prefix.family() {
            Family::V4 => IpAddr::from([0xff; 4]),
            Family::V6 => all,
        };
        let mask = Prefix::new(ones, prefix.length()).expect("it is a prefix's length");
        let loaded = self.address(REGISTER, prefix.family(), destination);
        loaded
            .bitwise(&bytes(mask.address()), &vec![0; address.len()])
            .compare(&address, true)
    }

    fn address(self, register: u32, family: Family, destination: bool) -> Self {
        let (source, length) = match family {
            Family::V4 => (12, 4),
            Family::V6 => (8, 16),
        };
        let offset = if destination { source + length } else { source };
        self.payload(register, Base::Network, offset, length)
    }

    /// Loads what names a TCP connection, as the keys of the sets have it.
    pub(super) fn connection(self, family: Family) -> Self {
        self.ends(family, false)
    }

    /// The same of a packet of the far end.
    pub(super) fn connection_back(self, family: Family) -> Self {
        self.ends(family, true)
    }

    fn ends(self, family: Family, back: bool) -> Self {
        let address = match family {
            Family::V4 => 1,
            Family::V6 => 4,
        };
        let (local, remote) = if back { (2, 0) } else { (0, 2) };
        self.family(family)
            .protocol(libc::IPPROTO_TCP)
            .address(WORDS, family, back)
            .payload(WORDS + address, Base::Transport, local, 2)
            .address(WORDS + address + 1, family, !back)
            .payload(WORDS + 2 * address + 1, Base::Transport, remote, 2)
    }

    pub(super) fn among(self, set: &str) -> Self {
        let data = Attributes::default().text(1, set).number(2, REGISTER);
        self.expression("lookup", data)
    }

    /// Puts what was loaded into a set, for some time; fails, as a match does, if the set is full.
    pub(super) fn remember(self, set: &str) -> Self {
        // NFTA_DYNSET_SET_NAME, _OP (update), _SREG_KEY, _TIMEOUT.
        let data = Attributes::default()
            .text(1, set)
            .number(3, 1)
            .number(4, REGISTER)
            .bytes(6, &UNTRACKED_FOR.to_be_bytes());
        self.expression("dynset", data)
    }

    /// No route leads back to the source by the device that the packet came by.
    pub(super) fn no_way_back(self) -> Self {
        // NFTA_FIB_DREG, _RESULT (a device), _FLAGS (source address, by this device, whether at all).
        let data = Attributes::default().number(1, REGISTER).number(2, 1);
        self.expression("fib", data.number(3, 0b10_1001))
            .compare(&[0], true)
    }

    fn verdict(self, code: i32) -> Self {
        // NFTA_IMMEDIATE_DREG, _DATA; NFTA_DATA_VERDICT; NFTA_VERDICT_CODE.
        let code = Attributes::default().bytes(1, &code.to_be_bytes());
        let data = Attributes::default().nested(2, code);
        let data = Attributes::default().number(1, VERDICT).nested(2, data);
        self.expression("immediate", data)
    }

    /// Back to what else looks at the packet.
    pub(super) fn returns(self) -> Self {
        self.verdict(-5)
    }

    pub(super) fn drops(self) -> Self {
        let counted = self.expression("counter", Attributes::default());
        Self {
            drops: true,
            ..counted.verdict(0)
        }
    }

    /// Source NAT to the source that it has.
    pub(super) fn keep_source(self, family: Family) -> Self {
        // NFTA_NAT_TYPE (source), _FAMILY, _REG_ADDR_MIN.
        let data = Attributes::default()
            .number(1, 0)
            .number(2, u32::from(number(family)))
            .number(3, REGISTER);
        self.address(REGISTER, family, false)
            .expression("nat", data)
    }
}

/// Where an offset counts from.
#[derive(Clone, Copy)]
enum Base {
    Network = 1,
    Transport = 2,
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
