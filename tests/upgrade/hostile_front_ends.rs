//! Front ends that could prevent an upgrade, beside a well-behaved one.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

use super::UpgradedDaemon;
use crate::{
    harness::{MIB, Scratch, text},
    vhost_user::{features, front_end, send_with_descriptor},
};

/// Shares `memory` as the first MiB of guest memory (`VHOST_USER_SET_MEM_TABLE`).
fn set_mem_table(stream: &mut UnixStream, memory: &File) {
    send_with_descriptor(stream, 5, &[1, 0, MIB, 1 << 32, 0], memory).expect("the daemon reads");
    // The reply proves that the message before it was processed.
    features(stream);
}

#[test]
fn hostile_front_end_does_not_prevent_an_upgrade() {
    let scratch = Scratch::new();
    let names = ["half", "gone", "good"];
    let disks = names.map(|name| text(&scratch.sparse(&format!("{name}.raw"), MIB)).to_owned());
    let sockets = names.map(|name| scratch.socket(name));
    let endpoints = sockets.each_ref().map(|socket| format!("unix:{}", text(socket)));
    let mut arguments: Vec<&str> = disks.iter().map(String::as_str).collect();
    for (name, endpoint) in names.iter().zip(&endpoints) {
        arguments.extend(["--name", name, "--vhost-user-blk", endpoint]);
    }
    let fixture = UpgradedDaemon::new(scratch, &arguments);
    let old = fixture.serve().start();
    let [mut half, mut disconnected, mut good] = sockets.each_ref().map(|socket| front_end(socket));
    let memory = [(); 2].map(|()| tempfile::tempfile_in("/dev/shm").expect("a file in memory"));
    for (stream, memory) in [&mut disconnected, &mut good].into_iter().zip(&memory) {
        memory.set_len(MIB).expect("the memory file can be resized");
        set_mem_table(stream, memory);
    }
    memory[0].set_len(0).expect("the memory file can be resized");
    features(&mut half);
    let question = [1_u32, 1, 0].map(u32::to_le_bytes).concat();
    half.write_all(&question[..7]).expect("the daemon reads");

    let (new, _) = fixture.upgrade(old);
    half.write_all(&question[7..]).expect("the daemon reads");
    half.read_exact(&mut [0; 20]).expect("the daemon replies");
    features(&mut good);
    assert_eq!(disconnected.read(&mut [0]).expect("it is closed"), 0);
    let line = new.wait_for_log("its virtual machine is disconnected");
    assert!(line.contains("export=\"gone@") && line.contains("of a file of 0 bytes"), "{line}");
    let taken_over = new.wait_for_log("kind=\"taken_over\"");
    assert!(taken_over.contains("with 2 clients"), "{taken_over}");
    features(&mut front_end(&sockets[1]));
}
