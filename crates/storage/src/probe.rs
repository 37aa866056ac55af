//! Recognizes the format of an image from its first bytes, and decides whether it may be served as
//! raw.
//!
//! A guest owns every byte of a raw image, so it can write the header of another format there. A
//! program that then *guesses* the format opens an image that the guest describes, for example a
//! qcow2 with `/etc/shadow` as its backing file. Three rules prevent that:
//!
//! - an image that looks like anything but raw or qcow2 needs `--format` ([`check_format`]);
//! - one that looks like qcow2 may name no other file, unless its format was given
//!   (`image::open`);
//! - a raw image whose format was guessed cannot be given such a header: `image::RawImage` rejects
//!   the write.
//!
//! The signatures are from the specifications of the formats. The list has the formats that QEMU
//! guesses, because QEMU may be the next program to open the image.
//!
//! A second list has compressed files and archives ([`Probed::Archive`]). They are served as raw,
//! since a guest may write one to its disk, and a [`warning`] names the program that unpacks them.

use std::{
    fs, io,
    os::unix::fs::{FileExt, OpenOptionsExt as _},
    path::Path,
    str::FromStr,
};

use libc::O_NONBLOCK;

use super::{
    InvalidValue, OpenError,
    file::{KINDS, not_an_image},
};

/// Length of the header that is probed, in bytes; every signature ends before it.
pub const HEADER_BYTES: usize = 512;

/// Formats that weir serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The bytes of the file are the bytes of the disk.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

impl ImageFormat {
    /// Name, as users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl FromStr for ImageFormat {
    type Err = InvalidValue;
    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        match text {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(InvalidValue::new(text, "is not a format that weir serves (raw, qcow2)")),
        }
    }
}

/// Result of probing an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probed {
    /// No signature found: the bytes are the disk, as far as is known.
    Raw,
    /// The signature of this format.
    Format(&'static str),
    /// A compressed file or an archive, or a disk on which a guest stores one.
    Archive(&'static str),
}

/// Offset, bytes and format name of each signature.
const SIGNATURES: &[(usize, &[u8], &str)] = &[
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "qed"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0x40, b"\x7f\x10\xda\xbe", "vdi"),
    (0, b"LUKS\xba\xbe", "luks"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"Bochs Virtual HD Image", "bochs"),
    (0, b"#!/bin/sh\n#V2.0 Format", "cloop"),
];

/// Compressed files and archives: gzip (RFC 1952, method 8), xz and zstd (their frame magic), bzip2
/// (magic of the first block), ZIP (local file header), tar (POSIX ustar; an OVA is one).
const ARCHIVES: &[(usize, &[u8], &str)] = &[
    (0, b"\x1f\x8b\x08", "gzip"),
    (0, b"\xfd7zXZ\0", "xz"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (4, b"\x31\x41\x59\x26\x53\x59", "bzip2"),
    (0, b"PK\x03\x04", "zip"),
    (257, b"ustar", "tar"),
];

/// Program that converts each format or archive to a disk that weir serves.
const CONVERTED_BY: &[(&str, &str)] = &[
    ("gzip", "gunzip"),
    ("xz", "unxz"),
    ("zstd", "unzstd"),
    ("bzip2", "bunzip2"),
    ("zip", "unzip"),
    ("tar", "tar -xf, and qemu-img convert -O qcow2 for the disks of an OVA"),
    ("vmdk", "qemu-img convert -f vmdk -O qcow2"),
    ("vdi", "qemu-img convert -f vdi -O qcow2"),
    ("vpc", "qemu-img convert -f vpc -O qcow2"),
    ("vhdx", "qemu-img convert -f vhdx -O qcow2"),
];

/// Signature of Apple's disk images, at the beginning of the last 512 bytes.
const DMG_TRAILER: &[u8] = b"koly";
/// Signature of a fixed VHD's footer: such a file is a raw disk followed by a footer of 512 bytes.
const VHD_FOOTER: &[u8] = b"conectix";

/// Probes the first bytes of a disk. A header shorter than [`HEADER_BYTES`] is treated as padded
/// with zeroes.
pub fn probe_header(header: &[u8]) -> Probed {
    let header = &header[..header.len().min(HEADER_BYTES)];
    let found = SIGNATURES
        .iter()
        .find(|(at, bytes, _)| header.get(*at..).is_some_and(|rest| rest.starts_with(bytes)));
    match found {
        Some((_, _, name)) => Probed::Format(name),
        None if is_vmdk_descriptor(header) => Probed::Format("vmdk"),
        None => Probed::Raw,
    }
}

fn probe_archive(header: &[u8]) -> Probed {
    let found = ARCHIVES
        .iter()
        .find(|(at, bytes, _)| header.get(*at..).is_some_and(|rest| rest.starts_with(bytes)))
        // The magic of bzip2's first block follows "BZh" and a level digit; require both.
        .filter(|(_, _, name)| *name != "bzip2" || header.starts_with(b"BZh"));
    found.map_or(Probed::Raw, |(_, _, name)| Probed::Archive(name))
}

/// True for a VMDK that begins with a text descriptor, which names other files: comments and empty
/// lines, then `version=`.
fn is_vmdk_descriptor(header: &[u8]) -> bool {
    let mut lines = header.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    lines
        .find(|line| !line.is_empty() && !line.starts_with(b"#"))
        .is_some_and(|line| line.starts_with(b"version="))
}

/// Probes the image at `path`.
///
/// # Errors
/// The image cannot be read.
pub fn probe(path: &Path) -> io::Result<Probed> {
    // Opening a named pipe, which is never an image, would wait for a writer.
    probe_file(&fs::File::options().read(true).custom_flags(O_NONBLOCK).open(path)?)
}

/// As [`probe`], for an open file.
pub(super) fn probe_file(file: &fs::File) -> io::Result<Probed> {
    let metadata = file.metadata()?;
    if let Some(why) = not_an_image(metadata.file_type()) {
        // A pipe, for example, does not support reads at an offset.
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{why} ({KINDS})")));
    }
    let mut header = [0; HEADER_BYTES];
    let length = read_up_to(file, &mut header, 0)?;
    let header = &header[..length];
    let size = metadata.len();
    let mut trailer = [0; HEADER_BYTES];
    let mut trailer_length = 0;
    if probe_header(header) == Probed::Raw && size >= HEADER_BYTES as u64 {
        trailer_length = read_up_to(file, &mut trailer, size - HEADER_BYTES as u64)?;
    }
    Ok(probe_ends(header, &trailer[..trailer_length]))
}

/// As [`probe`], for an open image whose format is known. Reads only the first sector, which costs
/// one request: a format whose signature is in the last sector is not recognized.
pub(super) fn probe_beginning(file: &fs::File) -> io::Result<Probed> {
    let mut header = [0; HEADER_BYTES];
    let length = read_up_to(file, &mut header, 0)?;
    Ok(probe_ends(&header[..length], &[]))
}

/// As [`probe`], given the first and the last [`HEADER_BYTES`] of the image, or all of a shorter
/// one.
pub(super) fn probe_ends(first: &[u8], last: &[u8]) -> Probed {
    let ends_with = |trailer: &[u8]| last.len() >= HEADER_BYTES && last.starts_with(trailer);
    match probe_header(first) {
        Probed::Raw if ends_with(DMG_TRAILER) => Probed::Format("dmg"),
        Probed::Raw if ends_with(VHD_FOOTER) => Probed::Archive("vpc"),
        Probed::Raw => probe_archive(first),
        probed => probed,
    }
}

fn read_up_to(file: &fs::File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Format to serve an image in: the explicit one, else the probed one if it is safe to trust. A
/// guess of qcow2 is safe only for an image that names no other file.
///
/// # Errors
/// No format was given, and the image looks neither raw nor like qcow2.
pub fn check_format(
    explicit: Option<ImageFormat>,
    probed: Probed,
    name: &str,
) -> Result<ImageFormat, OpenError> {
    match (explicit, probed) {
        (Some(format), _) => Ok(format),
        (None, Probed::Raw | Probed::Archive(_)) => Ok(ImageFormat::Raw),
        (None, Probed::Format("qcow2")) => Ok(ImageFormat::Qcow2),
        (None, Probed::Format(other)) => {
            let converter = converter(other).unwrap_or("qemu-img convert -O qcow2");
            Err(OpenError::new(
                name,
                format!("looks like {other}, so its format must be given"),
                format!(
                    "--format raw serves its bytes as they are; to serve the disk inside, convert \
                     it: {converter}"
                ),
            ))
        }
    }
}

fn converter(name: &str) -> Option<&'static str> {
    CONVERTED_BY.iter().find(|(format, _)| *format == name).map(|(_, command)| *command)
}

/// Warning about an image whose bytes are a compressed file, an archive or a foreign format that
/// contains a disk. `None` for all other images, also for LUKS and qcow2 inside a raw disk, which a
/// guest or a client has reason to store there.
pub fn warning(probed: Probed) -> Option<String> {
    let (Probed::Format(name) | Probed::Archive(name)) = probed else { return None };
    let converter = converter(name)?;
    Some(format!("looks like {name}, which a guest cannot use as a disk (convert it: {converter})"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn each_signature_is_recognised_at_its_place_only() {
        for &(at, signature, name) in SIGNATURES {
            let mut header = [0; HEADER_BYTES];
            header[at..at + signature.len()].copy_from_slice(signature);
            assert_eq!(probe_header(&header), Probed::Format(name));
            header[at] ^= 1;
            assert_eq!(probe_header(&header), Probed::Raw);
        }
    }

    #[test]
    fn compressed_files_are_named_and_stay_writable() {
        for &(at, signature, name) in ARCHIVES {
            let mut header = [0; HEADER_BYTES];
            header[..3].copy_from_slice(b"BZh");
            header[at..at + signature.len()].copy_from_slice(signature);
            assert_eq!(probe_ends(&header, &[]), Probed::Archive(name));
            assert_eq!(probe_header(&header), Probed::Raw, "a guest may write {name} to its disk");
            assert_eq!(check_format(None, Probed::Archive(name), "a"), Ok(ImageFormat::Raw));
            assert!(warning(Probed::Archive(name)).expect(name).contains("(convert it: "));
        }
        let mut footer = [0; HEADER_BYTES];
        footer[..8].copy_from_slice(VHD_FOOTER);
        assert_eq!(probe_ends(&[0; HEADER_BYTES], &footer), Probed::Archive("vpc"));
        for quiet in [Probed::Raw, Probed::Format("qcow2"), Probed::Format("luks")] {
            assert_eq!(warning(quiet), None);
        }
    }

    #[test]
    fn vmdk_descriptors_are_text() {
        assert_eq!(probe_header(b"# Disk DescriptorFile\r\n\r\nversion=1\n"), Probed::Format("vmdk"));
        assert_eq!(probe_header(b"version=3\n"), Probed::Format("vmdk"));
        assert_eq!(probe_header(b"# a script\nexit 0\nversion=1\n"), Probed::Raw);
    }

    #[test]
    fn disks_are_raw() {
        let mut boot_sector = [0; HEADER_BYTES];
        boot_sector[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(probe_header(&boot_sector), Probed::Raw);
        assert_eq!(probe_header(&[]), Probed::Raw);
        assert_eq!(probe_header(b"QFI"), Probed::Raw);
    }

    #[test]
    fn files_are_probed_at_both_ends() {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(&[0; 2048]).expect("written");
        assert_eq!(probe(file.path()).expect("readable"), Probed::Raw);
        file.as_file().write_all_at(b"koly", 2048 - 512).expect("written");
        assert_eq!(probe(file.path()).expect("readable"), Probed::Format("dmg"));
        // With an explicit format only the beginning is read.
        assert_eq!(probe_beginning(file.as_file()).expect("readable"), Probed::Raw);
        file.as_file().write_all_at(b"QFI\xfb", 0).expect("written");
        assert_eq!(probe_beginning(file.as_file()).expect("readable"), Probed::Format("qcow2"));
        assert_eq!(probe(file.path()).expect("readable"), Probed::Format("qcow2"));
    }

    #[test]
    fn only_safe_guesses_are_trusted() {
        assert_eq!(check_format(None, Probed::Raw, "a"), Ok(ImageFormat::Raw));
        assert_eq!(check_format(Some(ImageFormat::Raw), Probed::Format("qcow2"), "a"), Ok(ImageFormat::Raw));
        assert_eq!(check_format(None, Probed::Format("qcow2"), "a"), Ok(ImageFormat::Qcow2));
        let error = check_format(None, Probed::Format("vmdk"), "vm.img").expect_err("must be said");
        assert!(error.to_string().starts_with("vm.img: looks like vmdk, so its format must be given ("));
        assert!("qcow3".parse::<ImageFormat>().is_err());
    }
}
