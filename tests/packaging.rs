//! The files that are installed with the program: paths of `make install`, manual pages,
//! completions, systemd units, and the lines of fstab in the documents, each read by the program
//! that it is for.
//!
//! The Debian package has its own test, `tests/package`.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process,
};

use crate::harness::{
    MIB, Scratch, Serve, TestClient, WEIR, assert_contains, need, need_root, text, wait_for_programs, weir,
};

/// Path of the generator on Debian.
const FSTAB_GENERATOR: &str = "/usr/lib/systemd/system-generators/systemd-fstab-generator";

/// The lines of docs/containers.md.
const FSTAB: &str = "\
/dev/ublkb7            /srv/db   ext4  x-systemd.requires=weir-attach@db.service    0 2
/srv/images/vm1.qcow2  /mnt/vm1  weir  iops-total=2000,noatime           0 0
/srv/images/vm2.qcow2  /mnt/vm2  weir  noauto,x-systemd.automount                   0 0
/mnt/nfs/vm3.qcow2     /mnt/vm3  weir  _netdev,nofail                               0 0
";

/// Directory of the units below [`installed`].
const UNITS: &str = "usr/lib/systemd/system";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `scripts/install` with everything below a directory.
fn install(below: &Path, options: &[&str]) -> TestClient {
    TestClient::new(text(&repository().join("scripts/install")))
        .args([WEIR, "--destdir", text(below)])
        .args(options)
}

/// An installation, and mounts generated from `FSTAB`. The units refer to the tested binary.
fn installed() -> Scratch {
    let scratch = Scratch::new();
    install(&scratch.path(""), &["--prefix", "/usr"]).succeeds();
    let units = scratch.path(UNITS);
    for path in files_below(&units).iter().map(|path| units.join(path)).filter(|path| !path.is_symlink()) {
        let unit = fs::read_to_string(&path).expect("a unit is a text").replace("/usr/bin/weir", WEIR);
        fs::write(&path, unit).expect("the file can be written");
    }
    let (fstab, units) = (scratch.file("fstab", FSTAB), text(&units));
    let variable = format!("SYSTEMD_FSTAB={}", text(&fstab));
    TestClient::new("env").args([&variable, FSTAB_GENERATOR, units, units, units]).succeeds();
    scratch
}

/// All files except directories, as paths relative to `directory`.
fn files_below(directory: &Path) -> BTreeSet<PathBuf> {
    let found =
        TestClient::new("find").args([text(directory), "!", "-type", "d", "-printf", "%P\n"]).succeeds();
    found.lines().map(PathBuf::from).collect()
}

/// Messages of systemd about weir's units in a unit and its dependencies.
fn verify_unit(scratch: &Scratch, unit: &str) -> String {
    // The trailing colon appends systemd's own directories.
    let variable = format!("SYSTEMD_UNIT_PATH={}:", text(&scratch.path(UNITS)));
    let stderr = TestClient::new("env")
        .args([&variable, "systemd-analyze", "verify", "--man=no", "--recursive-errors=yes", unit])
        .run()
        .stderr();
    // Messages about the host's own units are ignored.
    let unit_names = ["weir", "srv-db", "mnt-vm"];
    stderr
        .lines()
        .filter(|line| unit_names.iter().any(|name| line.contains(name)))
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn systemd_accepts_the_units() {
    need("systemd-analyze");
    let scratch = installed();
    for unit in [
        "weir.service",
        "weir.socket",
        "weir@vm1.service",
        "weir@vm1.socket",
        "weir-attach@db.service",
        "weir-docker-plugin.service",
        "weir-docker-plugin.socket",
    ] {
        assert_eq!(verify_unit(&scratch, unit), "", "{unit}");
    }
    let path = scratch.path(UNITS).join("weir-docker-plugin.service");
    let unit = fs::read_to_string(&path).unwrap();
    fs::write(&path, unit.replace("KillMode=process", "KillMode=nobody")).unwrap();
    assert_ne!(verify_unit(&scratch, "weir-docker-plugin.service"), "", "systemd must report the error");
}

#[test]
fn device_precedes_its_mounts() {
    need("systemd-analyze");
    let scratch = installed();
    let mount = fs::read_to_string(scratch.path(UNITS).join("srv-db.mount")).unwrap();
    assert!(mount.contains("After=weir-attach@db.service"), "{mount}");
    // `basic.target` comes after all mounts, and most services after it.
    assert_eq!(verify_unit(&scratch, "basic.target"), "");
    let path = scratch.path(UNITS).join("weir-attach@.service");
    let unit = fs::read_to_string(&path).unwrap();
    fs::write(&path, unit.replace("DefaultDependencies=no\n", "")).unwrap();
    let cycle = verify_unit(&scratch, "basic.target");
    assert!(cycle.contains("weir-attach@db.service"), "a cycle must be found: {cycle}");
}

/// As in docs/recipes.md: Debian's nbd-client connects, then the file system is mounted.
#[test]
fn nbd_client_precedes_its_mount() {
    need("systemd-analyze");
    let recipes = fs::read_to_string(repository().join("docs/recipes.md")).unwrap();
    let line = recipes.lines().find(|line| line.starts_with("/dev/nbd0 ")).expect("the recipe has this line");
    let scratch = Scratch::new();
    let (fstab, units) = (scratch.file("fstab", format!("{line}\n")), scratch.path(UNITS));
    fs::create_dir_all(&units).unwrap();
    let variable = format!("SYSTEMD_FSTAB={}", text(&fstab));
    TestClient::new("env")
        .args([&variable, FSTAB_GENERATOR, text(&units), text(&units), text(&units)])
        .succeeds();
    let mount = fs::read_to_string(units.join("srv-db.mount")).unwrap();
    for needed in ["Requires=nbd@nbd0.service", "After=nbd@nbd0.service", "Type=ext4"] {
        assert!(mount.contains(needed), "{needed}: {mount}");
    }
    assert_eq!(verify_unit(&scratch, "srv-db.mount"), "");
    fs::write(units.join("srv-db.mount"), mount.replace("nbd@", "nobody@")).unwrap();
    assert_ne!(verify_unit(&scratch, "srv-db.mount"), "", "systemd must report the error");
}

/// Exposure of a service from 0 to 10, as computed by systemd-analyze(1).
fn exposure(scratch: &Scratch, unit: &str) -> f64 {
    let variable = format!("SYSTEMD_UNIT_PATH={}:", text(&scratch.path(UNITS)));
    let stdout = TestClient::new("env")
        .args([&variable, "systemd-analyze", "security", "--no-pager", "--offline=true", unit])
        .succeeds();
    let last = stdout
        .lines()
        .find(|line| line.contains("Overall exposure level"))
        .expect("systemd-analyze prints the exposure");
    let figure = last.split(": ").nth(1).and_then(|rest| rest.split(' ').next());
    figure.and_then(|figure| figure.parse().ok()).unwrap_or_else(|| panic!("no figure in {last:?}"))
}

#[test]
fn services_have_low_exposure() {
    need("systemd-analyze");
    let scratch = installed();
    for unit in ["weir.service", "weir@vm1.service"] {
        let exposure = exposure(&scratch, unit);
        assert!(exposure <= 2.0, "{unit}: {exposure}");
    }
    // As `systemctl edit` does; the unit file suggests it.
    let before = exposure(&scratch, "weir.service");
    let edited = "[Service]\nDeviceAllow=\nSupplementaryGroups=\nRestrictAddressFamilies=\nRestrictAddressFamilies=AF_UNIX\n";
    let overriding = scratch.path(UNITS).join("weir.service.d/override.conf");
    fs::write(&overriding, edited).unwrap();
    let closed = exposure(&scratch, "weir.service");
    assert!(closed < before, "the drop-in restricts more: {closed}, before {before}");
    fs::write(&overriding, "[Service]\nProtectHome=no\nPrivateTmp=no\n").unwrap();
    let open = exposure(&scratch, "weir.service");
    assert!(open > before, "the drop-in relaxes more: {open}, before {before}");
    fs::remove_file(overriding).unwrap();
    // As in docs/devices.md, for a service that creates devices.
    let guide = fs::read_to_string(repository().join("docs/devices.md")).unwrap();
    let text = guide.split("/etc/systemd/system/weir.service.d/10-sandbox.conf\n").nth(1);
    let text = text.and_then(|rest| rest.split("```").next()).expect("the file exists");
    let sandbox = scratch.path(UNITS).join("weir.service.d/10-sandbox.conf");
    fs::write(&sandbox, text).unwrap();
    assert_eq!(verify_unit(&scratch, "weir.service"), "");
    assert!(exposure(&scratch, "weir.service") > 8.0, "the service runs as root and may mount");
    fs::remove_file(sandbox).unwrap();
    assert!(exposure(&scratch, "weir.service") > 9.0, "without the sandbox the exposure is higher");
}

#[test]
fn installation_is_repeatable_and_removable() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let below = scratch.path("");
    install(&below, &[]).succeeds();
    let found = files_below(&below);
    for path in [
        "etc/weir/weir.toml",
        "usr/local/bin/weir",
        "usr/local/lib/systemd/system/weir.service",
        "usr/local/lib/systemd/system/weir.service.d/10-sandbox.conf",
        "usr/local/lib/sysusers.d/weir.conf",
        "usr/local/lib/tmpfiles.d/weir.conf",
        "usr/local/lib/udev/rules.d/61-weir.rules",
        "usr/local/share/bash-completion/completions/weir",
        "usr/local/share/doc/weir/LICENSE-MIT",
        "usr/local/share/doc/weir/docs/reference/cli/serve.md",
        "usr/local/share/doc/weir/docs/reference/config.schema.json",
        "usr/local/share/doc/weir/prometheus/weir.rules.yml",
        "usr/local/share/weir/proxmox/PVE/Storage/Custom/WeirPlugin.pm",
        "usr/local/share/fish/vendor_completions.d/weir.fish",
        "usr/local/share/man/man1/weir-serve.1",
        "usr/local/share/man/man5/weir.toml.5",
        "usr/local/share/man/man8/mount.weir.8",
        "usr/local/share/zsh/site-functions/_weir",
        "usr/sbin/mount.weir",
    ] {
        assert!(found.contains(Path::new(path)), "{path}: {found:?}");
    }
    assert_eq!(fs::read_link(below.join("usr/sbin/mount.weir")).unwrap(), Path::new("/usr/local/bin/weir"));
    let unit = fs::read_to_string(below.join("usr/local/lib/systemd/system/weir.service")).unwrap();
    assert!(unit.contains("ExecStart=/usr/local/bin/weir serve "), "{unit}");
    let was = fs::metadata(WEIR).unwrap().len();
    assert!(
        fs::metadata(below.join("usr/local/bin/weir")).unwrap().len() < was,
        "the installed program is not stripped"
    );

    // The administrator's file is kept by an upgrade.
    let config = below.join("etc/weir/weir.toml");
    fs::write(&config, "# mine\n").unwrap();
    fs::write(below.join("usr/local/bin/weir"), "old").unwrap();
    install(&below, &[]).succeeds();
    assert_eq!(files_below(&below), found);
    assert_eq!(fs::read_to_string(&config).unwrap(), "# mine\n");
    assert_ne!(fs::read(below.join("usr/local/bin/weir")).unwrap(), b"old");
    let stderr = install(&below, &["--uninstall"]).run().stderr();
    assert!(stderr.contains("weir.toml was changed and is kept"), "{stderr}");
    assert_eq!(files_below(&below), [PathBuf::from("etc/weir/weir.toml")].into());

    // If the config file is unchanged, the removal leaves no file of weir.
    let below = other.path("");
    install(&below, &["--prefix", "/usr"]).succeeds();
    install(&below, &["--prefix", "/usr", "--uninstall"]).succeeds();
    let left = TestClient::new("find").args([text(&below), "-path", "*weir*"]).succeeds();
    let left: Vec<_> = left.lines().filter(|path| path[text(&below).len()..].contains("weir")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn shipped_config_file_is_valid() {
    let shipped = fs::read_to_string(repository().join("packaging/weir.toml")).unwrap();
    let parsed = settings::config::parse("weir.toml", &shipped, Path::new("/etc/weir")).unwrap();
    assert!(
        parsed.disks.is_empty() && parsed.groups.is_empty(),
        "all disks and groups of the shipped file are comments"
    );
    // A comment after `##` is prose; one after `# ` is a setting or prose.
    let is_setting = |line: &&str| line.starts_with("# [") || line.contains(" = ");
    let lines =
        shipped.lines().map(|line| if is_setting(&line) { line.trim_start_matches("# ") } else { line });
    let parsed =
        settings::config::parse("weir.toml", &lines.collect::<Vec<_>>().join("\n"), Path::new("/etc/weir"))
            .unwrap();
    assert_eq!((parsed.disks.len(), parsed.groups.len()), (1, 1));
}

#[test]
fn manual_pages_are_complete() {
    need("mandoc");
    need("groff");
    let scratch = Scratch::new();
    weir(&["generate", text(&scratch.path("")), "--date", "2026-01-02"]).succeeds();
    let directory = scratch.path("man/man1");
    let mut pages: Vec<_> = files_below(&directory).iter().map(|page| directory.join(page)).collect();
    assert!(pages.len() > 30, "{pages:?}");
    pages.push(scratch.path("man/man5/weir.toml.5"));
    TestClient::new("mandoc").args(["-Tlint", "-Wwarning"]).args(&pages).succeeds();
    for page in &pages {
        let stderr =
            TestClient::new("groff").args(["-man", "-ww", "-z", "-Tutf8", "-Kutf8"]).arg(page).run().stderr();
        assert_eq!(stderr, "", "{}", page.display());
    }
    let broken = scratch.file("broken.1", ".TH A 1 2026-01-02\n.SH NAME\na \\- b\n.nosuch\n");
    TestClient::new("mandoc").args(["-Tlint", "-Wwarning"]).arg(&broken).fails();
}

#[test]
fn shells_complete_from_the_running_daemon() {
    for shell in ["bash", "fish", "zsh"] {
        need(shell);
    }
    let scratch = Scratch::new();
    weir(&["generate", text(&scratch.path("")), "--date", "2026-01-02"]).succeeds();
    let qmp = format!("unix:{}", text(&scratch.socket("qmp")));
    let daemon = Serve::new(&scratch)
        .args(["memory:1M", "memory:1M", "--name", "vm1", "--name", "vm2", "--group", "gold"])
        .args(["--iops-total", "100", "--qmp", &qmp])
        .start();
    let home = scratch.path("");
    let bash = text(&scratch.path("bash-completion/completions/weir")).to_owned();
    let fish = text(&scratch.path("fish/vendor_completions.d/weir.fish")).to_owned();
    let offered = |line: &str| {
        let arguments: Vec<_> = line.split(' ').collect();
        let last = arguments.len() - 1;
        let script = format!(
            "source {bash}; COMP_WORDS=({line}''); COMP_CWORD={last}; COMP_TYPE=9; \
             _weir weir \"${{COMP_WORDS[COMP_CWORD]}}\"; \
             echo \"${{COMPREPLY[*]}}\""
        );
        let completions = shell("bash", &script, &qmp, &home);
        let of_fish = shell("fish", &format!("source {fish}; complete -C '{line}'"), &qmp, &home);
        let of_fish: Vec<_> = of_fish.lines().filter_map(|line| line.split('\t').next()).collect();
        let of_bash: Vec<_> = completions.split_whitespace().map(str::to_owned).collect();
        assert_eq!(of_bash, of_fish, "{line}");
        of_bash
    };
    assert_eq!(offered("weir throttle v"), ["vm1", "vm2"]);
    assert_eq!(offered("weir throttle vm1 --group "), ["gold"]);
    assert_eq!(offered("weir serve --cache d"), ["directsync"]);
    // Words split as by readline.
    let cut = |arguments: &str, last: &str| {
        let script = format!(
            "source {bash}; COMP_WORDS=({arguments} '{last}'); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 \
             )); COMP_TYPE=9; _weir weir '{last}'; echo \"${{COMPREPLY[*]}}\""
        );
        shell("bash", &script, &qmp, &home)
    };
    assert_eq!(cut("weir serve --cache =", "writet"), "writethrough\n");
    assert_eq!(cut("weir throttle vm1 --group =", ""), cut("weir throttle vm1 --group", "="));
    assert!(cut("weir serve --cache", "=").contains("directsync"));
    daemon.stop();
    assert_eq!(offered("weir throttle v"), [""; 0], "without a daemon, no completions and no messages");
    TestClient::new("zsh").args(["-n", text(&scratch.path("zsh/site-functions/_weir"))]).succeeds();
}

/// Output of a script on stdout; asserts that it prints nothing to stderr.
fn shell(shell: &str, script: &str, qmp: &str, home: &Path) -> String {
    let program = Path::new(WEIR).parent().expect("it lies in a directory");
    let outcome = TestClient::new("env")
        // fish writes caches to the home directory.
        .args([&format!("WEIR_QMP={qmp}"), &format!("HOME={}", text(home)), shell, "-c", script])
        .with_path(program)
        .run();
    assert_eq!((outcome.code(), outcome.stderr().as_str()), (0, ""), "{shell}: {script}");
    outcome.stdout()
}

#[test]
fn fstab_lines_match_the_documents() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/containers.md");
    let document = fs::read_to_string(document).expect("it is a text");
    let normalized = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let written: Vec<_> = document.lines().map(normalized).collect();
    for line in FSTAB.lines().map(normalized) {
        assert!(written.contains(&line), "{line}");
    }
}

#[test]
fn mount_helper_mounts_an_image() {
    need_root("mounts");
    let scratch = Scratch::new();
    let (helper, directory) = (scratch.path("mount.weir"), scratch.path("directory"));
    symlink(WEIR, &helper).unwrap();
    fs::create_dir(&directory).unwrap();
    let image = scratch.sparse("disk.raw", 16 * MIB);
    TestClient::new("mkfs.ext4").args(["-q", "-F", text(&image)]).succeeds();
    // As mount(8) calls it, over FUSE, which every host has.
    let options = format!("rw,noatime,fuse,alone,format=raw,iops-total=100000,name=helper-{}", process::id());
    let mount = |flags: &str| {
        let arguments = [text(&helper), text(&image), text(&directory), flags, "-o", &options];
        let outcome = TestClient::new("env").arg("PATH=/usr/bin:/bin").args(arguments).run();
        let stderr = outcome.stderr();
        outcome.succeeded() + &stderr
    };
    mount("-f");
    assert!(options_of(&directory).is_none(), "-f must not mount");
    assert_eq!(mount("-n"), "", "a successful mount prints nothing");
    assert_eq!(mount("-n"), "", "a repeated mount succeeds");
    let mounted = options_of(&directory).expect("it is mounted");
    assert!(mounted.split(',').any(|option| option == "noatime"), "{mounted}");
    fs::write(directory.join("file"), "kept").unwrap();
    wait_for_programs();
    weir(&["detach", text(&directory)]).succeeds();
    assert!(options_of(&directory).is_none());
    assert_contains(&mount("-v"), &["FUSE", "/dev/loop"]);
    weir(&["detach", text(&directory)]).succeeds();
    let found = TestClient::new("debugfs").args(["-R", "cat /file", text(&image)]).succeeds();
    assert_eq!(found, "kept");
}

/// Mount options of this mount point.
fn options_of(directory: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("procfs is mounted");
    let mut lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    lines.find(|fields| fields[1] == text(directory)).map(|fields| fields[3].to_owned())
}
