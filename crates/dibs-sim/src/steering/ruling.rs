//! Rules of a host, which its users add, change and remove.

use dibs_wire::FlowKey;
use std::ops::RangeInclusive;

use dibs_settings::{BumpId, Level};
use dibs_switch::rules::{self, Fit};

use super::machine::Live;

/// A rule that the daemon and the kernel can follow alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The bump that it puts connections on.
    pub bump: BumpId,
    /// How firmly.
    pub level: Level,
    /// Connections that it means.
    pub meant: Selected,
    /// True if it holds at this time of day.
    pub holds: bool,
}

/// True if rules are those that are `known`, but that some begin or end to hold.
pub(super) fn are_turned(rules: &[Rule], known: &[Rule]) -> bool {
    let are_same = |(rule, known): (&Rule, &Rule)| {
        let holds = known.holds;
        Rule {
            holds,
            ..rule.clone()
        } == *known
    };
    rules != known && rules.len() == known.len() && rules.iter().zip(known).all(are_same)
}

/// The connections that a rule means.
#[derive(Clone, Debug, PartialEq)]
pub enum Selected {
    /// By the numbers that their ports are made of.
    Ports(RangeInclusive<u16>),
    /// One.
    One(FlowKey),
}

impl Rule {
    /// True if it means a connection.
    pub fn means(&self, pair: &FlowKey) -> bool {
        let is_meant = match &self.meant {
            // Clients have ports from 20,000 on, servers from 30,000 on, by number of the connection.
            Selected::Ports(numbers) => numbers.contains(&(pair.sport % 10_000)),
            Selected::One(meant) => pair == meant,
        };
        self.holds && is_meant
    }

    /// Rule that requires a bump of one connection.
    pub(super) fn requiring(pair: FlowKey, bump: BumpId) -> Self {
        Self {
            bump,
            level: Level::Require,
            meant: Selected::One(pair),
            holds: true,
        }
    }

    /// True if it is for a single connection, by no user.
    pub(super) fn is_of_one(&self) -> bool {
        matches!(self.meant, Selected::One(_))
    }

    /// True if it is for this connection alone.
    pub(super) fn is_only_of(&self, pair: &FlowKey) -> bool {
        matches!(&self.meant, Selected::One(one) if one == pair)
    }
}

impl rules::Rule<Live> for Rule {
    fn bump(&self) -> Option<BumpId> {
        Some(self.bump)
    }

    fn level(&self) -> Level {
        self.level
    }

    fn fit(&self, live: &Live) -> Fit {
        match self.means(&live.0.pair) {
            true => Fit::Means,
            false => Fit::Not,
        }
    }
}
