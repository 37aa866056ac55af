//! `qemu-nbd`: a link to weir of this name accepts that program's command line, so that scripts
//! work unchanged.
//!
//! ```text
//!   arguments ──► -d: disconnects a device
//!       │    └──► -L: lists the exports of another server
//!       └─ objects, image ──► options of `weir serve` ──► serves
//! ```
//!
//! Everything specific to QEMU is here: options, defaults (one client, every address, an export
//! with an empty name) and exit statuses. Unsupported options are rejected by name;
//! docs/from-qemu.md lists them. Source: qemu-nbd(8), and the behaviour of QEMU 7.2.

mod arguments;
mod device;
mod image;
mod list;
mod objects;
mod overlay;

use std::{env, ffi::OsString, fs, process::ExitCode};

use anyhow::{Context as _, anyhow, bail};
use block::disk::DetectZeroes;
use clap::Parser as _;
use console::CommandFailure;

use self::{arguments::QemuNbdArgs, image::ServedImage, objects::QemuObjects, overlay::SnapshotOverlay};
use super::{error_line, exit_status, print_clap_error, serve, version};
use crate::{background, cli::Cli};

/// Name of the link.
pub(super) const NAME: &str = "qemu-nbd";

/// Runs the process's command line and returns the exit status, 0 or 1.
pub(super) fn main() -> ExitCode {
    let arguments = match QemuNbdArgs::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return print_clap_error(NAME, &error),
    };
    // qemu-nbd forks for -c as well, unless it is verbose.
    let forks = arguments.fork || arguments.connect.is_some() && !arguments.verbose;
    if forks && !background::is_background() {
        return background::start().unwrap_or_else(|error| exit_status(NAME, Err(error.into())));
    }
    exit_status(NAME, run(&arguments))
}

fn run(arguments: &QemuNbdArgs) -> Result<(), CommandFailure> {
    if arguments.version {
        return version(NAME);
    }
    reject_unsupported(arguments)?;
    if arguments.list {
        return list::run(arguments);
    }
    let [file] = &arguments.file[..] else {
        return Err(anyhow!("Invalid number of arguments (one FILE is needed)").into());
    };
    let file = file.to_str().with_context(|| format!("{}: not UTF-8 (rename it)", file.display()))?;
    if arguments.disconnect {
        return Ok(device::disconnect(file)?);
    }
    let objects = QemuObjects::read(&arguments.object)?;
    let mut image = match arguments.image_opts {
        true => ServedImage::of_options(file, &objects)?,
        false => ServedImage::of_file(file, &objects)?,
    };
    // The overlay's backing file is the whole image: a snapshot or a part cannot be selected.
    if arguments.snapshot
        && (arguments.load_snapshot.is_some() || arguments.offset.is_some() || !image.part.is_empty())
    {
        return Err(anyhow!("--snapshot: cannot be used with --load-snapshot or a part of the image").into());
    }
    let overlay = arguments.snapshot.then(|| SnapshotOverlay::over(&mut image, arguments.format.as_deref()));
    let overlay = overlay.transpose()?;
    let options = to_serve(arguments, image, &objects)?;
    let arguments = Cli::serve(options.into_iter().map(OsString::from));
    let arguments = arguments.map_err(|error| anyhow!(error_line(&error.render().to_string()).to_owned()))?;
    // When the server is ready, the daemon has the overlay open and its name can go.
    serve(arguments, move || drop(overlay)).map_err(|failure| match failure {
        CommandFailure::Failed(error) | CommandFailure::Usage(error) => {
            CommandFailure::Failed(with_qemu_options(error))
        }
        other => other,
    })
}

/// Replaces the option of `weir serve` in an error by the option of `qemu-nbd`.
fn with_qemu_options(error: anyhow::Error) -> anyhow::Error {
    let text = format!("{error:#}");
    for (there, here) in
        [("--snapshot", "--load-snapshot"), ("--options", "--offset"), ("--name", "--export-name")]
    {
        if let Some(rest) = text.strip_prefix(there) {
            return anyhow!("{here}{rest}");
        }
    }
    error
}

/// Rejects options that weir does not support.
fn reject_unsupported(arguments: &QemuNbdArgs) -> anyhow::Result<()> {
    let absent = [
        ("trace", &arguments.trace, "weir has no trace events; --verbose logs more"),
        ("selinux-label", &arguments.selinux_label, "label the socket's directory instead"),
        ("tls-hostname", &arguments.tls_hostname, "--list does not support TLS; `nbdinfo --list` does"),
    ];
    if let Some((name, _, instead)) = absent.into_iter().find(|(_, value, _)| value.is_some()) {
        bail!("--{name}: not supported ({instead})");
    }
    Ok(())
}

/// Equivalent command line of `weir serve`.
fn to_serve(
    arguments: &QemuNbdArgs,
    image: ServedImage,
    objects: &QemuObjects,
) -> anyhow::Result<Vec<String>> {
    // qemu-nbd prints nothing on success.
    let level = if arguments.verbose { "info" } else { "error" };
    let mut options = vec![format!("--log={level}"), "--qmp=none".to_owned()];
    let device = arguments.connect.as_deref();
    let nbd = listen_option(arguments)?;
    if device.is_none() || nbd.is_some() {
        options.extend(nbd);
        options.extend(client_options(arguments, objects)?);
    } else if arguments.tls_creds.is_some() {
        bail!("TLS is not supported with a host device");
    }
    options.extend(device.map(|device| format!("--nbd-device={device}")));
    if !arguments.persistent {
        // Without -t, qemu-nbd ends when its last client disconnects.
        options.push("--exit-when-idle".to_owned());
    }
    if arguments.image_opts && arguments.format.is_some() {
        bail!("--image-opts and -f are mutually exclusive");
    }
    let mut add_option = |option: &str, value: Option<&str>| {
        options.extend(value.map(|value| format!("--{option}={value}")));
    };
    add_option(
        "pid-file",
        arguments
            .pid_file
            .as_deref()
            .map(|path| path.to_str().context("--pid-file: not UTF-8"))
            .transpose()?,
    );
    add_option("format", image.format.as_deref().or(arguments.format.as_deref()));
    add_option("cache", cache(arguments)?.or(image.cache.as_deref()));
    for bitmap in &arguments.bitmap {
        add_option("bitmap", Some(bitmap));
    }
    add_option("snapshot", arguments.load_snapshot.as_deref().map(snapshot));
    let discard = discard(arguments.discard.as_deref().or(image.discard.as_deref()))?;
    add_option("discard", Some(discard));
    let detect_zeroes = arguments.detect_zeroes.as_deref().or(image.detect_zeroes.as_deref());
    let detect_zeroes = choice("detect-zeroes", detect_zeroes, &DetectZeroes::ALL.map(DetectZeroes::name))?;
    // As in QEMU's block layer: detect-zeroes=unmap requires discard=unmap.
    if detect_zeroes == Some("unmap") && discard == "ignore" {
        bail!("--detect-zeroes=unmap frees space, but discards are ignored (add --discard=unmap)");
    }
    add_option("detect-zeroes", detect_zeroes.filter(|mode| *mode != "off"));
    let mut part = image.part;
    if let Some(offset) = &arguments.offset {
        settings::size(offset).map_err(|_| anyhow!("Invalid offset '{offset}'"))?;
        part.push(format!("offset={offset}"));
    }
    if !part.is_empty() {
        add_option("options", Some(&part.join(",")));
    }
    // Checked for typing errors only: io_uring is always used.
    choice("aio", arguments.aio.as_deref(), &["threads", "native", "io_uring"])?;
    options.extend(image.options);
    if arguments.read_only {
        options.push("--read-only".to_owned());
    }
    // The prefix keeps a path with a colon from being parsed as an address.
    let file = if image.is_remote { image.file } else { format!("file:{}", image.file) };
    options.extend(["--".to_owned(), file]);
    Ok(options)
}

/// Address to listen on; `None` with socket activation, or with a host device.
fn listen_option(arguments: &QemuNbdArgs) -> anyhow::Result<Option<String>> {
    let (port, bind) = (arguments.port.as_deref(), arguments.bind.as_deref());
    match &arguments.socket {
        // QEMU ignores a port beside a socket too.
        Some(path) => return Ok(Some(format!("--nbd=unix:{path}"))),
        None if port.is_none()
            && bind.is_none()
            && (arguments.connect.is_some() || is_socket_activated()) =>
        {
            return Ok(None);
        }
        None => {}
    }
    let (port, bind) = (port.unwrap_or("10809"), bind.unwrap_or("0.0.0.0"));
    let bind = if bind.contains(':') { format!("[{bind}]") } else { bind.to_owned() };
    let address = format!("{bind}:{port}");
    let _: settings::ListenAddress = address.parse().map_err(|rule| anyhow!("{address}: {rule}"))?;
    Ok(Some(format!("--nbd={address}")))
}

/// True if the service manager has passed sockets (sd_listen_fds(3)).
fn is_socket_activated() -> bool {
    let is_us = |number: String| number == std::process::id().to_string();
    env::var_os("LISTEN_FDS").is_some() && env::var("LISTEN_PID").map_or(true, is_us)
}

/// Options that concern only NBD clients.
fn client_options(arguments: &QemuNbdArgs, objects: &QemuObjects) -> anyhow::Result<Vec<String>> {
    let mut options = vec![
        format!("--name={}", arguments.export_name.as_deref().unwrap_or_default()),
        format!("--max-connections={}", shared(arguments.shared.as_deref())?),
        format!("--socket-mode={:o}", 0o777 & !umask()),
    ];
    if arguments.socket.is_none() {
        // QEMU has no limit for each address: all clients may be on one host.
        options.push("--max-connections-per-address=0".to_owned());
    }
    options.extend(arguments.description.as_ref().map(|text| format!("--description={text}")));
    if let Some(id) = &arguments.tls_creds {
        options.extend(objects.tls(id)?);
    }
    if let Some(id) = &arguments.tls_authz {
        if arguments.tls_creds.is_none() {
            bail!("--tls-authz is not permitted without --tls-creds");
        }
        options.extend(objects.names(id)?);
    }
    Ok(options)
}

fn shared(number: Option<&str>) -> anyhow::Result<u32> {
    let number = number.unwrap_or("1");
    number.parse().map_err(|_| anyhow!("Invalid shared device number '{number}'"))
}

/// The process's umask. qemu-nbd leaves the socket's mode to it.
fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    // umask(2) would have to change the value to read it; /proc does not.
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok()).unwrap_or(0o177)
}

fn cache(arguments: &QemuNbdArgs) -> anyhow::Result<Option<&str>> {
    if arguments.nocache {
        return Ok(Some("none"));
    }
    choice(
        "cache",
        arguments.cache.as_deref(),
        &["none", "writeback", "writethrough", "directsync", "unsafe"],
    )
}

fn discard(mode: Option<&str>) -> anyhow::Result<&'static str> {
    match choice("discard", mode, &["ignore", "off", "unmap", "on"])? {
        Some("unmap" | "on") => Ok("unmap"),
        _ => Ok("ignore"),
    }
}

fn choice<'a>(option: &str, value: Option<&'a str>, known: &[&str]) -> anyhow::Result<Option<&'a str>> {
    match value.filter(|value| !known.contains(value)) {
        Some(other) => bail!("Invalid {option} mode `{other}' (valid: {})", known.join(", ")),
        None => Ok(value),
    }
}

/// Id or name in `snapshot.id=ID`, `snapshot.name=NAME`, or plain.
fn snapshot(text: &str) -> &str {
    let first = text
        .split(',')
        .find_map(|part| part.strip_prefix("snapshot.id=").or_else(|| part.strip_prefix("snapshot.name=")));
    first.unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<String, String> {
        let tokens = std::iter::once(NAME).chain(line.split_whitespace());
        let arguments = QemuNbdArgs::try_parse_from(tokens).map_err(|error| error.to_string())?;
        let translate = |arguments: &QemuNbdArgs| {
            let objects = QemuObjects::read(&arguments.object)?;
            let file = arguments.file[0].to_str().unwrap();
            let image = match arguments.image_opts {
                true => ServedImage::of_options(file, &objects)?,
                false => ServedImage::of_file(file, &objects)?,
            };
            to_serve(arguments, image, &objects)
        };
        let options = translate(&arguments).map_err(|error: anyhow::Error| error.to_string())?;
        let is_serve = Cli::serve(options.iter().map(OsString::from));
        is_serve.map_err(|error| error.to_string())?;
        Ok(options.join(" "))
    }

    /// Compares the translation, without the options that every translation has.
    #[track_caller]
    fn becomes(line: &str, expect: &str) {
        let mode = format!(" --socket-mode={:o}", 0o777 & !umask());
        let options = read(line).unwrap().replace(&mode, "").replacen("--log=error ", "", 1).replacen(
            "--qmp=none ",
            "",
            1,
        );
        assert_eq!(options, expect, "{line}");
    }

    #[test]
    fn command_line_is_translated_to_serve() {
        becomes(
            "a.raw",
            "--nbd=0.0.0.0:10809 --name= --max-connections=1 --max-connections-per-address=0 \
             --exit-when-idle --discard=ignore -- file:a.raw",
        );
        becomes(
            "-t -k /s -x vm1 -D about -e 5 -f qcow2 -r -B b --pid-file=/p a",
            "--nbd=unix:/s --name=vm1 --max-connections=5 --description=about --pid-file=/p --format=qcow2 \
             --bitmap=b --discard=ignore --read-only -- file:a",
        );
        becomes(
            "-t -p 7 -b ::1 -e0 -n --aio=native --discard=unmap -f raw -o 512 a",
            "--nbd=[::1]:7 --name= --max-connections=0 --max-connections-per-address=0 \
             --format=raw --cache=none --discard=unmap --options=offset=512 -- file:a",
        );
        becomes(
            "-tk/s --image-opts driver=raw,offset=1,file.filename=a",
            "--nbd=unix:/s --name= --max-connections=1 --format=raw --discard=ignore \
             --options=offset=1 -- file:a",
        );
        becomes(
            "-tk /s --object tls-creds-psk,id=t,endpoint=server,dir=/k --tls-creds t \
             --object authz-simple,id=a,identity=CN=vm1,,O=Acme --tls-authz a a",
            "--nbd=unix:/s --name= --max-connections=1 --tls=required --tls-psk=/k \
             --tls-authz=CN=vm1,O=Acme --discard=ignore -- file:a",
        );
        becomes(
            "-c /dev/nbd0 -v -f raw a",
            "--log=info --nbd-device=/dev/nbd0 --exit-when-idle --format=raw --discard=ignore -- file:a",
        );
        becomes(
            "-tk /s -l snapshot.name=one --cache=unsafe --cache=writeback a",
            "--nbd=unix:/s --name= --max-connections=1 --cache=writeback --snapshot=one \
             --discard=ignore -- file:a",
        );
        // As in getopt_long(3): unambiguous abbreviations, and options after FILE.
        becomes(
            "a --persist --sock /s --object tls-creds-psk,id=t,endpoint=server,dir=/k --tls-creds t",
            "--nbd=unix:/s --name= --max-connections=1 --tls=required --tls-psk=/k \
             --discard=ignore -- file:a",
        );
    }

    #[test]
    fn invalid_options_are_rejected() {
        for (line, expect) in [
            ("-p x a", "0.0.0.0:x: has no port"),
            ("-e -1 a", "Invalid shared device number '-1'"),
            ("-o x a", "Invalid offset 'x'"),
            ("--cache=x a", "Invalid cache mode `x'"),
            ("-n --cache=none a", "cannot be used with"),
            ("--discard=x a", "Invalid discard mode `x'"),
            ("--detect-zeroes=x a", "Invalid detect-zeroes mode `x'"),
            ("--detect-zeroes=unmap a", "add --discard=unmap"),
            ("--aio=x a", "Invalid aio mode `x'"),
            ("--image-opts -f raw driver=raw,file.filename=a", "--image-opts and -f are mutually exclusive"),
            ("--tls-creds t a", "No TLS credentials with id 't'"),
            ("-P 1 a", "unexpected argument '-P'"),
            ("-f vmdk a", "'vmdk'"),
        ] {
            let message = read(line).unwrap_err();
            assert!(message.contains(expect), "{line}: {message}");
        }
        let absent = QemuNbdArgs::try_parse_from([NAME, "-T", "x", "a"]).unwrap();
        assert!(reject_unsupported(&absent).unwrap_err().to_string().starts_with("--trace: not supported"));
    }
}
