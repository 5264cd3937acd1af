//! The algorithms that `snow` calculates a handshake with, such that their secrets do not outlive them: X25519
//! of our own, as `snow`'s does not wipe its keys, and `snow`'s cipher and hash, written over before they go.

use snow::Error;
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::{Zeroize, Zeroizing};

use super::keys::Secret;

/// Hands them out, with a "generator" that holds just the ephemeral key.
pub(super) struct Wiping {
    ephemeral: Option<Secret>,
}

impl Wiping {
    /// For a handshake in which `ephemeral` is our key.
    pub(super) const fn with_ephemeral(ephemeral: Secret) -> Self {
        Self {
            ephemeral: Some(ephemeral),
        }
    }

    /// For a handshake that does not come to a message of ours.
    pub(super) const fn without_keys() -> Self {
        Self { ephemeral: None }
    }
}

impl CryptoResolver for Wiping {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Once(self.ephemeral.clone())))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        match choice {
            DHChoice::Curve25519 => Some(Box::new(X25519::default())),
            _ => None,
        }
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        let hash = DefaultResolver.resolve_hash(choice)?;
        Some(Box::new(WipedHash(hash)))
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        let cipher = DefaultResolver.resolve_cipher(choice)?;
        Some(Box::new(WipedCipher(cipher)))
    }
}

/// Gives 32 bytes once; a handshake makes one ephemeral key.
struct Once(Option<Secret>);

impl Random for Once {
    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Error> {
        let secret = self.0.as_ref().ok_or(Error::Rng)?;
        if out.len() != secret.as_bytes().len() {
            return Err(Error::Rng);
        }
        out.copy_from_slice(secret.as_bytes());
        // `take` would leave the bytes where they are.
        self.0.zeroize();
        Ok(())
    }
}

/// A key pair. Both kinds have one, static and ephemeral.
struct X25519 {
    private: StaticSecret,
    public: PublicKey,
}

impl Default for X25519 {
    /// A place for keys to come.
    fn default() -> Self {
        Self {
            private: StaticSecret::from([0; 32]),
            public: PublicKey::from([0; 32]),
        }
    }
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    fn set(&mut self, private: &[u8]) {
        let private: &[u8; 32] = private.try_into().expect("a private key has 32 bytes");
        self.private = StaticSecret::from(*private);
        self.public = PublicKey::from(&self.private);
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), Error> {
        let mut private = Zeroizing::new([0; 32]);
        rng.try_fill_bytes(&mut *private)?;
        self.set(&*private);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        self.public.as_bytes()
    }

    fn privkey(&self) -> &[u8] {
        self.private.as_bytes()
    }

    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), Error> {
        let public: &[u8; 32] = public.first_chunk().ok_or(Error::Dh)?;
        let shared = self.private.diffie_hellman(&PublicKey::from(*public));
        let out = out.first_chunk_mut().ok_or(Error::Dh)?;
        *out = *shared.as_bytes();
        Ok(())
    }
}

/// A cipher whose key is written over when it is dropped.
struct WipedCipher(Box<dyn Cipher>);

impl Cipher for WipedCipher {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn set(&mut self, key: &[u8; 32]) {
        self.0.set(key);
    }

    fn encrypt(&self, nonce: u64, authtext: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        self.0.encrypt(nonce, authtext, plaintext, out)
    }

    fn decrypt(
        &self,
        nonce: u64,
        authtext: &[u8],
        ciphertext: &[u8],
        out: &mut [u8],
    ) -> Result<usize, Error> {
        self.0.decrypt(nonce, authtext, ciphertext, out)
    }
}

impl Drop for WipedCipher {
    fn drop(&mut self) {
        self.0.set(&[0; 32]);
        core::hint::black_box(&mut self.0);
    }
}

/// A hash whose state, which has been a keyed one, is written over when it is dropped.
struct WipedHash(Box<dyn Hash>);

impl Hash for WipedHash {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn block_len(&self) -> usize {
        self.0.block_len()
    }

    fn hash_len(&self) -> usize {
        self.0.hash_len()
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn input(&mut self, data: &[u8]) {
        self.0.input(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        self.0.result(out);
    }
}

impl Drop for WipedHash {
    fn drop(&mut self) {
        self.0.reset();
        core::hint::black_box(&mut self.0);
    }
}
