//! A passphrase: bytes that are wiped when they are dropped, and never printed.
//!
//! It comes from a file or an open descriptor, never from an argument, because everybody on the
//! machine sees arguments. Like QEMU's `secret` object and cryptsetup's `--key-file`, it is the
//! whole content of the file, including a line break at the end.

use std::{
    fmt,
    fs::File,
    io::{self, ErrorKind, Read},
};

use zeroize::{Zeroize, Zeroizing};

/// The longest passphrase that is read, in bytes; a larger file is a mistake.
pub const LONGEST_SECRET: usize = 64 << 10;

/// A passphrase or key.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Takes the bytes, and with them the duty to wipe them.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Reads everything there is in `file`; blocks, where that is a pipe until its other end is
    /// closed.
    ///
    /// # Errors
    /// The system's, and [`ErrorKind::InvalidData`] if it is empty or longer than
    /// [`LONGEST_SECRET`].
    pub fn read(mut file: File) -> io::Result<Self> {
        // Never grown, so that no copy is left behind in memory that was given back.
        let mut bytes = Zeroizing::new(vec![0; LONGEST_SECRET + 1]);
        let mut length = 0;
        loop {
            match file.read(&mut bytes[length..]) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        match length {
            0 => Err(io::Error::new(ErrorKind::InvalidData, "it is empty")),
            1..=LONGEST_SECRET => Ok(Self::new(bytes[..length].to_vec())),
            _ => Err(io::Error::new(ErrorKind::InvalidData, "it has more than 64 KiB")),
        }
    }

    /// The bytes themselves.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret")
    }
}

impl Zeroize for Secret {
    fn zeroize(&mut self) {
        self.0.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(content).expect("written");
        file.rewind().expect("rewound");
        file
    }

    #[test]
    fn a_passphrase_is_all_of_the_file() {
        assert_eq!(Secret::read(file(b"two words\n")).expect("read").expose(), b"two words\n");
        let longest = vec![7; LONGEST_SECRET];
        assert_eq!(Secret::read(file(&longest)).expect("read").expose(), longest);
    }

    #[test]
    fn nothing_and_too_much_are_refused() {
        assert_eq!(Secret::read(file(b"")).expect_err("empty").to_string(), "it is empty");
        assert!(Secret::read(file(&vec![7; LONGEST_SECRET + 1])).is_err());
    }

    #[test]
    fn it_is_never_printed() {
        assert_eq!(format!("{:?}", Secret::new(b"geheim".to_vec())), "Secret");
    }
}
