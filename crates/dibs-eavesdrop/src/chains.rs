//! A run of scrambled bytes as 65 chains, each of which is known up to one byte.

/// Chains of a run: `B[i] ^ B[i-1] = b[i] ^ b[i-65]`.
pub const CHAINS: usize = 65;
/// Plaintext bytes in front of a run that it tells of, too.
pub const BEFORE: usize = CHAINS - 1;

/// Facts that consecutive scrambled bytes say for certain.
#[derive(Clone, Debug)]
pub struct Chains {
    /// Each plaintext byte, from `b[-64]` on, XORed with the first one of its chain.
    relative: Vec<u8>,
    /// The XOR of the first bytes of all chains.
    parity: u8,
}

/// The first byte of each chain.
pub(crate) type Keys = [u8; CHAINS];

impl Chains {
    /// Chains of a run.
    ///
    /// # Panics
    /// If the run has no byte.
    pub fn of(run: &[u8]) -> Self {
        let parity = *run.first().expect("a run has a byte");
        let mut relative = vec![0; BEFORE + run.len()];
        for i in 1..run.len() {
            relative[BEFORE + i] = relative[i - 1] ^ run[i] ^ run[i - 1];
        }
        Self { relative, parity }
    }

    /// How many plaintext bytes are concerned: those of the run, and 64 before it.
    pub fn bytes(&self) -> usize {
        self.relative.len()
    }

    /// The XOR of a plaintext byte, counted from 64 before the run on, and the first one of its chain.
    ///
    /// # Panics
    /// If there is no such byte.
    pub fn relative(&self, at: usize) -> u8 {
        self.relative[at]
    }

    /// What the first bytes of all chains lack to fit the run; zero if they fit.
    pub(crate) fn misfit(&self, keys: &Keys) -> u8 {
        keys.iter().fold(self.parity, |sum, key| sum ^ key)
    }

    /// The plaintext from 64 bytes before the run on, given the first byte of each chain.
    pub(crate) fn plaintext(&self, keys: &Keys) -> Vec<u8> {
        let all = self.relative.iter().enumerate();
        all.map(|(at, byte)| byte ^ keys[at % CHAINS]).collect()
    }
}
