//! Keys in WireGuard's form: 32 bytes, base64.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use x25519_dalek::StaticSecret;
use zeroize::Zeroizing;

use crate::error::cure;

/// A text is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not the base64 of 32 bytes.
    #[error("is not a key, which is the base64 of 32 bytes")]
    Form,
    /// A point of small order: whoever uses it agrees on a secret that everybody knows.
    #[error("is not a usable public key")]
    Weak,
}

/// A file that should hold a key does not.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file could not be read.
    #[error("key file {}: {}{}", .0.display(), .1, cure(.1.kind()))]
    Io(PathBuf, std::io::Error),
    /// Group or others may access it, by these permission bits.
    #[error("key file {} can be read by others (mode {:04o}): run chmod 600 on it", .0.display(), .1)]
    Exposed(PathBuf, u32),
    /// Somebody else's: he can read it, and put another key there.
    #[error("key file {} belongs to uid {owner}, but must belong to root or to uid {reader}, which reads it: \
             chown it", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// The effective uid of this process.
        reader: u32,
    },
    /// A directory, device or the like.
    #[error("key file {} is not a file", .0.display())]
    NotAFile(PathBuf),
    /// It holds something else.
    #[error("the content of key file {} {}", .0.display(), .1)]
    Key(PathBuf, KeyError),
}

/// An X25519 public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        PublicKey::try_from(*decode(text)?)
    }
}

impl TryFrom<[u8; 32]> for PublicKey {
    type Error = KeyError;

    fn try_from(bytes: [u8; 32]) -> Result<Self, KeyError> {
        let probe = StaticSecret::from([1; 32]).diffie_hellman(&bytes.into());
        if probe.was_contributory() {
            Ok(PublicKey(bytes))
        } else {
            Err(KeyError::Weak)
        }
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An X25519 private key, wiped when dropped; in a box, as what moves about leaves copies behind.
#[derive(Clone)]
pub struct PrivateKey(Box<StaticSecret>);

impl PrivateKey {
    /// A new key out of the system's generator.
    pub fn generate() -> Self {
        PrivateKey(Box::new(StaticSecret::from(*random())))
    }

    /// The key that the base64 in `text` stands for.
    pub fn from_base64(text: &str) -> Result<Self, KeyError> {
        Ok(PrivateKey(Box::new(StaticSecret::from(*decode(text)?))))
    }

    /// Key of these bytes.
    pub(crate) fn from_bytes(bytes: &[u8; 32]) -> Self {
        PrivateKey(Box::new(StaticSecret::from(*bytes)))
    }

    /// The public key that belongs to it.
    pub fn public(&self) -> PublicKey {
        PublicKey(x25519_dalek::PublicKey::from(&*self.0).to_bytes())
    }

    /// The key's bytes; clamping is X25519's business.
    pub fn as_bytes(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }

    /// The key as files hold it.
    pub fn to_base64(&self) -> Zeroizing<String> {
        encode(self.as_bytes())
    }
}

/// A preshared key, wiped when dropped.
#[derive(Clone)]
pub struct PresharedKey(Zeroizing<[u8; 32]>);

impl PresharedKey {
    /// A new key out of the system's generator.
    pub fn generate() -> Self {
        PresharedKey(random())
    }

    /// The key that the base64 in `text` stands for.
    pub fn from_base64(text: &str) -> Result<Self, KeyError> {
        decode(text).map(PresharedKey)
    }

    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The key as files hold it.
    pub fn to_base64(&self) -> Zeroizing<String> {
        encode(&self.0)
    }
}

/// Reads a private key from a file that only its owner may access, who is root or the user that this process runs as.
pub fn read_private_key(path: &Path) -> Result<PrivateKey, KeyFileError> {
    read(path, PrivateKey::from_base64)
}

/// Reads a preshared key from a file of the same kind.
pub fn read_preshared_key(path: &Path) -> Result<PresharedKey, KeyFileError> {
    read(path, PresharedKey::from_base64)
}

fn read<K>(path: &Path, parse: fn(&str) -> Result<K, KeyError>) -> Result<K, KeyFileError> {
    let path = path.to_owned();
    let io = |error| KeyFileError::Io(path.clone(), error);
    // The opened file is what is asked for its mode, so that it cannot be another one by then. Of a pipe
    // nobody need ever write to the other end.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(&path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(KeyFileError::NotAFile(path));
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeyFileError::Exposed(path, mode));
    }
    let (owner, reader) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    if ![0, reader].contains(&owner) {
        return Err(KeyFileError::Foreign {
            path,
            owner,
            reader,
        });
    }
    // Full capacity from the start: a growing buffer leaves copies of the key behind.
    const LIMIT: usize = 256;
    let mut bytes = Zeroizing::new(Vec::with_capacity(LIMIT));
    file.take(LIMIT as u64)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    std::str::from_utf8(&bytes)
        .map_err(|_| KeyError::Form)
        .and_then(|text| parse(text.trim_ascii()))
        .map_err(|error| KeyFileError::Key(path, error))
}

fn random() -> Zeroizing<[u8; 32]> {
    let mut bytes = Zeroizing::new([0; 32]);
    getrandom::fill(&mut *bytes).expect("the system's generator serves since boot");
    bytes
}

fn decode(text: &str) -> Result<Zeroizing<[u8; 32]>, KeyError> {
    // 44 characters hold up to 33 bytes.
    let mut bytes = Zeroizing::new([0; 33]);
    if text.len() != 44 || STANDARD.decode_slice(text, &mut *bytes) != Ok(32) {
        return Err(KeyError::Form);
    }
    let mut key = Zeroizing::new([0; 32]);
    key.copy_from_slice(&bytes[..32]);
    Ok(key)
}

fn encode(key: &[u8; 32]) -> Zeroizing<String> {
    // With room for the end of a line: growing would leave a copy behind.
    let mut text = Zeroizing::new(String::with_capacity(45));
    STANDARD.encode_string(key, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// RFC 7748, 6.1, in base64.
    const PRIVATE: &str = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
    const PUBLIC: &str = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=";

    #[test]
    fn public_key_of_rfc_7748() {
        let key = PrivateKey::from_base64(PRIVATE).unwrap();
        assert_eq!(key.public().to_string(), PUBLIC);
        assert_eq!(*key.to_base64(), PRIVATE);
    }

    #[test]
    fn new_keys_differ() {
        assert_ne!(
            PrivateKey::generate().as_bytes(),
            PrivateKey::generate().as_bytes()
        );
        let psk = PresharedKey::generate();
        let again = PresharedKey::from_base64(&psk.to_base64()).unwrap();
        assert_eq!(again.as_bytes(), psk.as_bytes());
    }

    #[test]
    fn other_texts_are_no_keys() {
        let unpadded = &PUBLIC[..43];
        let trailing_bits = PUBLIC.replace("mo=", "mp=");
        for bad in [
            "",
            "key",
            unpadded,
            &trailing_bits,
            &PUBLIC.replace('/', "_"),
        ] {
            assert_eq!(bad.parse::<PublicKey>(), Err(KeyError::Form), "{bad}");
        }
        let zero = STANDARD.encode([0; 32]);
        assert_eq!(zero.parse::<PublicKey>(), Err(KeyError::Weak));
    }

    #[test]
    fn key_files_belong_to_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, format!("{PRIVATE}\n")).unwrap();
        for (mode, open) in [(0o600, false), (0o400, false), (0o640, true), (0o604, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            match read_private_key(&path) {
                Ok(key) => assert!(!open && key.public().to_string() == PUBLIC, "{mode:o}"),
                Err(error) => {
                    assert!(
                        open && matches!(error, KeyFileError::Exposed { .. }),
                        "{error}"
                    );
                }
            }
        }
    }

    /// Whoever owns the file could replace the key by his own, and be this host.
    #[test]
    fn key_files_of_other_users_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, format!("{PRIVATE}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(read_private_key(&path).is_ok() && read_preshared_key(&path).is_ok());
        if std::os::unix::fs::chown(&path, Some(1234), None).is_err() {
            eprintln!("NOT TESTED: a file of another user, which only root can make");
            return;
        }
        let reader = nix::unistd::geteuid().as_raw();
        for error in [
            read_private_key(&path).err(),
            read_preshared_key(&path).err(),
        ] {
            let said = error.expect("it is refused").to_string();
            let expected = format!(
                "key file {} belongs to uid 1234, but must belong to root or to uid {reader}, which reads \
                 it: chown it",
                path.display()
            );
            assert_eq!(said, expected);
        }
    }

    #[test]
    fn key_files_hold_keys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let error = |path| read_preshared_key(path).err().unwrap();
        assert!(matches!(error(&path), KeyFileError::Io { .. }));
        assert!(matches!(error(dir.path()), KeyFileError::NotAFile { .. }));
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        assert!(matches!(error(&pipe), KeyFileError::NotAFile { .. }));
        for content in [&b""[..], b"\xff\xfe", &[b'A'; 1000]] {
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            assert!(matches!(error(&path), KeyFileError::Key { .. }));
        }
    }
}
