//! `mount.weir`: helper of mount(8) for the file system type `weir`, so that a line of fstab mounts
//! an image.
//!
//! The program is recognized by its name: `/sbin/mount.weir` is a link to it. It translates the
//! helper's command line to one of `weir attach`, and runs that.
//!
//! ```text
//!   /srv/vm1.qcow2  /mnt/vm1  weir  iops-total=2000,group=gold,noatime  0 0
//!
//!   mount.weir /srv/vm1.qcow2 /mnt/vm1 -o rw,iops-total=2000,group=gold,noatime
//!   weir attach --as-mount --mount=/mnt/vm1 --iops-total=2000 --group=gold --mount-options=noatime -- …
//! ```
//!
//! `--as-mount` follows the conventions of mount(8): no output on success without `-v`, and no
//! error if the image is already mounted there, since `mount -a` is run repeatedly.

use std::{ffi::OsString, path::Path};

/// Name of the link to the program.
const NAME: &str = "mount.weir";
/// Options of `attach` that fstab must not set: the line itself implies them, or they would mount
/// nothing.
const NOT_IN_FSTAB: [&str; 10] =
    ["help", "version", "mount", "mount-options", "json", "udev", "list", "recover", "as-mount", "verbose"];
/// Options for mount(8) and systemd, ignored here unless they have a value. mount(8) removes most
/// of them before it calls a helper.
const IGNORED_OPTIONS: [&str; 12] = [
    "defaults", "rw", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group",
    "loop",
];

/// True if the program was called as the helper.
pub(crate) fn is_called(program: Option<&OsString>) -> bool {
    program.is_some_and(|program| Path::new(program).file_name().is_some_and(|name| name == NAME))
}

/// Command line of `weir attach`; `None` for a dry run (`-f`). `known` returns true for names of
/// options of `attach`.
///
/// # Errors
/// If the command line does not have the form of mount(8), "EXTERNAL HELPERS".
pub(crate) fn to_attach(
    arguments: impl IntoIterator<Item = OsString>,
    known: impl Fn(&str) -> bool,
) -> Result<Option<Vec<OsString>>, String> {
    let mut arguments = arguments.into_iter();
    let (mut positionals, mut options, mut is_fake, mut is_verbose) =
        (Vec::new(), String::new(), false, false);
    while let Some(argument) = arguments.next() {
        let mut value =
            || arguments.next().ok_or_else(|| format!("{} needs a value", argument.to_string_lossy()));
        match argument.to_str() {
            Some("-o") => {
                let more = value()?.into_string().map_err(|_| "-o: its value is not UTF-8".to_owned())?;
                options += ",";
                options += &more;
            }
            // `-N`: mount(8) has entered the mount namespace already. `-t`: the type is known.
            Some("-N" | "-t") => drop(value()?),
            Some(flags) if flags.len() > 1 && flags.starts_with('-') => {
                if let Some(unknown) = flags[1..].chars().find(|flag| !"sfnv".contains(*flag)) {
                    return Err(format!("-{unknown} is not an option of a mount helper"));
                }
                is_fake |= flags.contains('f');
                is_verbose |= flags.contains('v');
            }
            _ => positionals.push(argument),
        }
    }
    let [image, directory] = &positionals[..] else {
        return Err("expected an image and a directory (mount -t weir IMAGE DIRECTORY)".to_owned());
    };
    if is_fake {
        return Ok(None);
    }
    let mut mount = OsString::from("--mount=");
    mount.push(directory);
    let mut attach = vec![OsString::from("attach"), "--as-mount".into()];
    attach.extend(is_verbose.then(|| "--verbose".into()));
    attach.push(mount);
    attach.extend(attach_options(&options, known).into_iter().map(OsString::from));
    attach.extend(["--".into(), image.clone()]);
    Ok(Some(attach))
}

/// Translates the value of `-o`: options that `attach` has keep their names, all others become
/// mount options of the file system.
fn attach_options(options: &str, known: impl Fn(&str) -> bool) -> Vec<String> {
    let (mut arguments, mut mount_options) = (Vec::new(), Vec::new());
    for option in options.split(',').filter(|option| !option.is_empty()) {
        let (name, value) =
            option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        let is_ignored = value.is_none() && IGNORED_OPTIONS.contains(&name);
        if is_ignored || name == "comment" || name.starts_with("x-") || name.starts_with("X-") {
            continue;
        }
        // `ro` is for both: the disk must reject writes, and the file system must be mounted
        // read-only.
        if name == "ro" {
            arguments.push("--read-only".to_owned());
        }
        if name != "ro" && !NOT_IN_FSTAB.contains(&name) && known(name) {
            // An option of `attach` wins over a mount option of the same name: `group=gold` is a
            // group of weir, although mount(8) has an option `group` (without a value).
            arguments.push(format!("--{option}"));
        } else {
            mount_options.push(option);
        }
    }
    if !mount_options.is_empty() {
        arguments.push(format!("--mount-options={}", mount_options.join(",")));
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(name: &str) -> bool {
        ["iops-total", "group", "read-only", "mount", "list", "fstype", "name", "verbose"].contains(&name)
    }

    fn read(line: &str) -> Result<Option<String>, String> {
        let attach = to_attach(line.split(' ').map(OsString::from), known)?;
        Ok(attach.map(|arguments| arguments.join(&OsString::from(" ")).into_string().unwrap()))
    }

    #[track_caller]
    fn becomes(line: &str, expect: &str) {
        assert_eq!(read(line).unwrap().unwrap(), expect);
    }

    #[test]
    fn fstab_line_is_translated_to_attach() {
        becomes("/a.qcow2 /mnt", "attach --as-mount --mount=/mnt -- /a.qcow2");
        becomes(
            "/a.qcow2 /mnt -o rw,iops-total=2000,group=gold,noatime,data=ordered",
            "attach --as-mount --mount=/mnt --iops-total=2000 --group=gold \
             --mount-options=noatime,data=ordered -- /a.qcow2",
        );
        becomes(
            "/a /mnt -o ro,fstype=xfs",
            "attach --as-mount --mount=/mnt --read-only --fstype=xfs --mount-options=ro -- /a",
        );
        becomes(
            "-a /mnt -v -n -s -t weir -N /proc/1/ns/mnt".replacen("-a", "./-a", 1).as_str(),
            "attach --as-mount --verbose --mount=/mnt -- ./-a",
        );
    }

    #[test]
    fn foreign_options_are_ignored() {
        becomes(
            "/a /mnt -o defaults,noauto,nofail,_netdev,group,x-systemd.automount,comment=x,noatime",
            "attach --as-mount --mount=/mnt --mount-options=noatime -- /a",
        );
        // fstab must not turn the mount into another operation.
        becomes(
            "/a /mnt -o list,mount=/etc,o=x,verbose",
            "attach --as-mount --mount=/mnt --mount-options=list,mount=/etc,o=x,verbose -- /a",
        );
    }

    #[test]
    fn invalid_command_lines_are_rejected() {
        assert_eq!(read("/a /mnt -fv").unwrap(), None, "a dry run mounts nothing");
        assert!(read("/a").unwrap_err().starts_with("expected an image and a directory"));
        assert!(read("/a /b /c").unwrap_err().starts_with("expected an image and a directory"));
        assert_eq!(read("/a /b -o").unwrap_err(), "-o needs a value");
        assert_eq!(read("/a /b --help").unwrap_err(), "-- is not an option of a mount helper");
    }

    #[test]
    fn the_program_is_known_by_its_name() {
        for (name, expect) in [
            ("/sbin/mount.weir", true),
            ("mount.weir", true),
            ("/usr/bin/weir", false),
            ("mount.weir/x", false),
        ] {
            assert_eq!(is_called(Some(&name.into())), expect);
        }
        assert!(!is_called(None));
    }
}
