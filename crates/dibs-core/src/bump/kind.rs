//! What a line of [`KINDS`](super::KINDS) says: what a bump is called, and how it is made.

use std::collections::{BTreeMap, BTreeSet};

use super::{Bump, Method};

/// A kind of bump.
#[derive(Debug)]
pub struct Kind {
    /// Names its bump in marks and on the wire: 1 to [`MAX_NUMBER`](super::MAX_NUMBER), the same at
    /// both ends.
    pub number: u8,
    /// Names it for the user, and is the `name` and `kind` of its `[[bump]]`.
    pub name: &'static str,
    /// What whoever uses it should hear.
    pub warning: Option<&'static str>,
    /// Keys of its `[[bump]]` that take a whole number. Without any key it cannot be listed.
    pub numbers: &'static [&'static str],
    /// Keys that take `true` or `false`.
    pub flags: &'static [&'static str],
    /// Makes it as it is set. With no key set it succeeds, whatever the number of paths.
    pub method: fn(&Settings) -> Result<Method, Unfit>,
}

/// What a configuration says to a kind.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// How many paths this host has.
    pub paths: usize,
    /// The [numbers](Kind::numbers) that are set.
    pub numbers: BTreeMap<&'static str, u32>,
    /// The [flags](Kind::flags) that are true.
    pub flags: BTreeSet<&'static str>,
}

/// Why there is no bump with such settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// The key at fault, which is set.
    pub key: &'static str,
    /// The rest of the sentence that begins with the key.
    pub reason: String,
    /// What to do.
    pub hint: &'static str,
}

impl Kind {
    /// Its bump, as it is set.
    ///
    /// # Errors
    /// If it cannot be so.
    pub fn bump(&self, settings: &Settings) -> Result<Bump, Unfit> {
        Ok(self.with((self.method)(settings)?))
    }

    /// Its bump on a host with so many paths, with nothing set.
    pub fn usual(&self, paths: usize) -> Bump {
        let settings = Settings {
            paths,
            ..Settings::default()
        };
        let usual = self.bump(&settings);
        usual.expect("a kind of bump can be made with nothing set")
    }

    /// Its bump with this method.
    pub(super) fn with(&self, method: Method) -> Bump {
        Bump {
            number: self.number,
            name: self.name,
            warning: self.warning,
            method,
        }
    }

    /// Whether there is anything to set.
    pub fn has_settings(&self) -> bool {
        !(self.numbers.is_empty() && self.flags.is_empty())
    }
}
