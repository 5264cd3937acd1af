//! Hosts that join by one line. The line has a [`Token`], which its ends keep in `state_dir`, for root alone, until it is used:
//!
//! | file | at | content |
//! |---|---|---|
//! | `tokens/ID` | the host that printed the line | second since 1970 at which the token is void, and the networks of this host |
//! | `peers/NAME.toml` | there | `[[peer]]` of a host that joined; it counts as if it stood at the end of the configuration file |
//! | `token` | the host that joins | public key of the other one, the token, and the name of this host |
//!
//! ID is one-way, so nobody who reads `tokens` can join by it.

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use zeroize::Zeroizing;

use crate::{Config, Error, KeyError, PrivateKey, PublicKey, parse, state_dir};

/// Time for which a token can be used.
pub const LIFETIME: Duration = Duration::from_secs(3600);

/// Secret of a line, by which one host may join. A private key, because its public key is an id that does not reveal it.
#[derive(Clone)]
pub struct Token(PrivateKey);

impl Token {
    /// Token that `text`, its base64, stands for.
    ///
    /// # Errors
    /// Text that is not the base64 of 32 bytes.
    pub fn from_base64(text: &str) -> Result<Self, KeyError> {
        PrivateKey::from_base64(text).map(Self)
    }

    /// Base64, as in the line.
    pub fn to_base64(&self) -> Zeroizing<String> {
        self.0.to_base64()
    }

    /// Ticket with which a host of this name asks to be taken: the token, and the name.
    pub fn ticket(&self, name: &str) -> Zeroizing<Vec<u8>> {
        let mut ticket = Zeroizing::new(Vec::with_capacity(32 + name.len()));
        ticket.extend_from_slice(self.0.as_bytes());
        ticket.extend_from_slice(name.as_bytes());
        ticket
    }

    /// Token and name in a ticket.
    pub fn of_ticket(ticket: &[u8]) -> Option<(Self, &str)> {
        let (token, name) = ticket.split_first_chunk()?;
        let name = str::from_utf8(name).ok()?;
        Some((Self(PrivateKey::from_bytes(token)), name))
    }

    fn id(&self) -> String {
        let id = self.0.public();
        id.as_bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.0.public() == other.0.public()
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Configuration of a file, and of the peers that joined.
///
/// # Errors
/// As of [`load`](crate::load).
pub fn load(file: &Path) -> Result<Config, Error> {
    let store = Store::new(state_dir(file));
    let (name, peers) = (file.display().to_string(), store.0.join(PEERS));
    let text = fs::read_to_string(file).map_err(|error| Error::unread(file, &error))?;
    let joined = store
        .joined()
        .map_err(|error| Error::unread(&peers, &error))?;
    if joined.is_empty() {
        return parse(&name, &text);
    }
    let both = format!("{name} with {}", peers.display());
    // A fault of the file alone is shown there.
    parse(&both, &format!("{text}\n{joined}"))
        .map_err(|error| parse(&name, &text).err().unwrap_or(error))
}

const TOKENS: &str = "tokens";
const PEERS: &str = "peers";
const OWN: &str = "token";

/// Files of a `state_dir`, see the module.
pub struct Store(PathBuf);

impl Store {
    /// Store in this directory.
    pub const fn new(state_dir: PathBuf) -> Self {
        Self(state_dir)
    }

    /// Makes a token that can be used from `now`, in time since 1970, and forgets those that are void. No address in
    /// `networks` is to be lent to the host that uses it.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn offer(&self, now: Duration, networks: &[IpNet]) -> io::Result<Token> {
        let directory = self.0.join(TOKENS);
        for file in entries(&directory)?.filter(|file| networks_of(file, now).is_none()) {
            fs::remove_file(file)?;
        }
        let token = Token(PrivateKey::generate());
        let mut text = (now + LIFETIME).as_secs().to_string();
        for network in networks {
            text += &format!("\n{network}");
        }
        write(&directory.join(token.id()), text.as_bytes())?;
        Ok(token)
    }

    /// Networks of this host as they were when a token was made, if it can be used now.
    pub fn networks(&self, token: &Token, now: Duration) -> Option<Vec<IpNet>> {
        networks_of(&self.0.join(TOKENS).join(token.id()), now)
    }

    /// Takes a host that uses a token, which cannot be used again whatever comes of this.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn accept(&self, token: &Token, name: &str, section: &str) -> io::Result<()> {
        let directory = self.0.join(TOKENS);
        fs::remove_file(directory.join(token.id()))?;
        fs::File::open(directory)?.sync_all()?;
        write(&self.peer(name), section.as_bytes())
    }

    /// Forgets a peer that joined; false if there is none of this name.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn remove(&self, name: &str) -> io::Result<bool> {
        removed(&self.peer(name))
    }

    /// True if a peer of this name joined.
    pub fn has_joined(&self, name: &str) -> bool {
        self.peer(name).exists()
    }

    /// Keeps the token with which this host joins `server`, by this name.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn keep(&self, server: &PublicKey, token: &Token, name: &str) -> io::Result<()> {
        let text = Zeroizing::new(format!("{server} {} {name}\n", *token.to_base64()));
        write(&self.0.join(OWN), text.as_bytes())
    }

    /// Ticket of the token that is kept, and its server; none if it was used.
    pub fn kept(&self) -> Option<(PublicKey, Zeroizing<Vec<u8>>)> {
        let text = Zeroizing::new(fs::read_to_string(self.0.join(OWN)).ok()?);
        let mut words = text.split_ascii_whitespace();
        let (server, token) = (words.next()?.parse().ok()?, words.next()?);
        let ticket = Token::from_base64(token).ok()?.ticket(words.next()?);
        Some((server, ticket))
    }

    /// Forgets that token; false if there is none.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn forget(&self) -> io::Result<bool> {
        removed(&self.0.join(OWN))
    }

    fn peer(&self, name: &str) -> PathBuf {
        self.0.join(PEERS).join(format!("{name}.toml"))
    }

    /// Sections of all peers that joined, by name.
    fn joined(&self) -> io::Result<String> {
        let mut files: Vec<PathBuf> = entries(&self.0.join(PEERS))?
            .filter(|file| file.extension().is_some_and(|end| end == "toml"))
            .collect();
        files.sort_unstable();
        files.iter().map(fs::read_to_string).collect()
    }
}

fn networks_of(file: &Path, now: Duration) -> Option<Vec<IpNet>> {
    let text = fs::read_to_string(file).ok()?;
    let mut lines = text.lines();
    let until: u64 = lines.next()?.parse().ok()?;
    // A clock that was set back does not prolong it.
    let is_open = (1..=LIFETIME.as_secs()).contains(&until.saturating_sub(now.as_secs()));
    is_open.then(|| lines.map(|line| line.parse().ok()).collect())?
}

/// Files of a directory, if that is there.
fn entries(directory: &Path) -> io::Result<impl Iterator<Item = PathBuf> + use<>> {
    let all = match fs::read_dir(directory) {
        Ok(all) => all.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    Ok(all?.into_iter())
}

fn removed(file: &Path) -> io::Result<bool> {
    match fs::remove_file(file) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Puts a file into the place of another, whole, for root alone.
fn write(file: &Path, content: &[u8]) -> io::Result<()> {
    let directory = file.parent().unwrap_or(Path::new("/"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let new = file.with_extension("new");
    let mut options = OpenOptions::new();
    let mut written = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    written.write_all(content)?;
    written.sync_all()?;
    fs::rename(&new, file)?;
    fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);

    #[test]
    fn a_token_works_once_and_for_an_hour() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("lib"));
        let networks = ["10.77.0.0/16".parse().unwrap()];
        let [first, second] = [(); 2].map(|()| store.offer(NOW, &networks).unwrap());
        let other = Token(PrivateKey::generate());
        let last = LIFETIME - Duration::from_secs(1);
        for (token, at, is_open) in [
            (&first, NOW, true),
            (&second, NOW + last, true),
            (&second, NOW + LIFETIME, false),
            (&second, NOW - Duration::from_secs(1), false),
            (&other, NOW, false),
        ] {
            let open = store.networks(token, at);
            assert_eq!(open, is_open.then(|| networks.to_vec()), "{at:?}");
        }
        store.accept(&first, "van", "[[peer]]\n").unwrap();
        assert!(store.has_joined("van") && store.networks(&first, NOW).is_none());
        // Neither the first, nor one that never was.
        for token in [&first, &other] {
            assert!(store.accept(token, "ship", "[[peer]]\n").is_err());
        }
        assert_eq!(store.joined().unwrap(), "[[peer]]\n");
        // Nothing is left of those that are void.
        store.offer(NOW + LIFETIME, &[]).unwrap();
        let left: Vec<_> = entries(&dir.path().join("lib/tokens")).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        let mode = fs::metadata(&left[0]).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(store.remove("van").unwrap() && !store.remove("van").unwrap());
        assert_eq!(store.joined().unwrap(), "");
    }

    #[test]
    fn a_token_is_kept_for_its_server_and_a_ticket_names_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("lib"));
        assert!(store.kept().is_none());
        let (server, token) = (
            PrivateKey::generate().public(),
            Token(PrivateKey::generate()),
        );
        store.keep(&server, &token, "van").unwrap();
        assert_eq!(store.kept(), Some((server, token.ticket("van"))));
        assert!(store.forget().unwrap() && !store.forget().unwrap());

        let ticket = token.ticket("van");
        assert_eq!(Token::of_ticket(&ticket), Some((token, "van")));
        assert_eq!(Token::of_ticket(&ticket[..31]), None);
        assert_eq!(Token::of_ticket(&[255; 33]), None);
    }

    #[test]
    fn a_token_is_as_docs_protocol_md_says() {
        let document = include_str!("../../../docs/protocol.md");
        let hexadecimal =
            |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
        let line = document
            .lines()
            .find_map(|line| line.strip_prefix("    dibs1,"));
        let line = format!("dibs1,{}", line.unwrap());
        let host: crate::setup::Introduction = line.parse().unwrap();
        assert_eq!(host.to_string(), line);
        let token = host.token.unwrap();
        for (name, digits) in [
            ("responder_public", hexadecimal(host.public_key.as_bytes())),
            ("token", hexadecimal(token.0.as_bytes())),
            ("token_public", token.id()),
            ("ticket", hexadecimal(&token.ticket("van"))),
        ] {
            assert!(
                document.contains(&format!("\n{name} = {digits}\n")),
                "{name}"
            );
        }
    }

    #[test]
    fn peers_that_joined_stand_behind_those_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dibsd.toml");
        let lib = dir.path().join("lib");
        let peer = |name: &str, at: u8| {
            let key = PrivateKey::generate().public();
            format!(
                "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\nappears_as = [\"10.77.0.{at}\"]\n"
            )
        };
        let text = format!(
            "[daemon]\nstate_dir = \"{}\"\n[[path]]\nname = \"w\"\ninterface = \"w\"\ntrust = \"untrusted\"\n{}",
            lib.display(),
            peer("a", 2)
        );
        fs::write(&file, &text).unwrap();
        let names = || {
            let config = load(&file).unwrap();
            config
                .peers
                .into_iter()
                .map(|peer| peer.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(), ["a"]);
        let store = Store::new(lib);
        for (name, at) in [("van", 3), ("ship", 4)] {
            let token = store.offer(NOW, &[]).unwrap();
            store.accept(&token, name, &peer(name, at)).unwrap();
        }
        assert_eq!(names(), ["a", "ship", "van"]);
        let fault = || load(&file).unwrap_err().to_string();
        fs::write(&file, format!("{text}nonsense")).unwrap();
        assert!(
            fault().starts_with(&format!("{}:", file.display())),
            "{}",
            fault()
        );
        // Somebody wrote the name of one that joined into the file.
        fs::write(&file, text + &peer("van", 5)).unwrap();
        assert!(fault().contains("lib/peers:"), "{}", fault());
    }
}
