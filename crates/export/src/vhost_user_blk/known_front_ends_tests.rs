//! Conversations as QEMU, libblkio, Firecracker and Cloud Hypervisor hold them.

use super::*;

/// QEMU 7.2: first its firmware with one ring, then Linux with two.
#[test]
fn qemu_with_its_firmware_and_then_linux() {
    use code::*;
    let mut qemu = SessionFrontEnd::new(offer());
    let offered = offer().features();
    assert_eq!(qemu.plain(GET_FEATURES, &[]), format!("reply {offered:#x}"));
    assert_eq!(qemu.plain(GET_PROTOCOL_FEATURES, &[]), "reply 0x1b22b");
    assert_eq!(qemu.plain(SET_PROTOCOL_FEATURES, &number(protocol::OFFERED)), "");
    assert_eq!(qemu.plain(GET_QUEUE_NUM, &[]), "reply 0x2");
    assert_eq!(qemu.session.queried_queue_count(), Some(2), "one that leaves now has more");
    assert_eq!(qemu.plain(GET_MAX_MEM_SLOTS, &[]), "reply 0x1fd");
    assert_eq!(qemu.session.queried_queue_count(), None);
    assert_eq!(qemu.send(SET_BACKEND_REQ_FD, NEED_REPLY, &[], vec![channel()]), "reply 0x0");
    assert_eq!(qemu.plain(SET_OWNER, &[]), "");
    assert_eq!(qemu.plain(GET_FEATURES, &[]), format!("reply {offered:#x}"));
    for ring in 0..2 {
        assert_eq!(qemu.send(SET_VRING_CALL, PLAIN, &number(ring), vec![event()]), "");
        assert_eq!(qemu.send(SET_VRING_ERR, PLAIN, &number(ring), vec![event()]), "");
    }
    assert_eq!(qemu.plain(GET_CONFIG, &config(0, 57)), "reply of 69");
    assert_eq!(qemu.payload[12..20], 100_u64.to_le_bytes());

    // The firmware does not offer FLUSH, so writes go through.
    let firmware = virtio::PROTOCOL_FEATURES | virtio::VERSION_1 | virtio::SEG_MAX | virtio::BLK_SIZE;
    assert_eq!(qemu.plain(SET_FEATURES, &number(firmware)), "cache false");
    let mut has_memory = false;
    let request = [numbers(&[0, 0]), vec![2, 0, 128, 0, 0, 0, 0, 0]].concat();
    let mut start = |qemu: &mut SessionFrontEnd, features: u64, rings: u32, base: u32| {
        assert_eq!(qemu.plain(GET_STATUS, &[]), "reply 0x0");
        assert_eq!(qemu.plain(SET_STATUS, &number(8)), "");
        assert_eq!(qemu.plain(GET_INFLIGHT_FD, &request), "reply of 24");
        let (area, file) = (qemu.payload.clone(), qemu.descriptor.take().expect("a file"));
        assert_eq!(area[..8], (2 * 16448_u64 + 64).to_ne_bytes(), "two rings of 1024, and a choice");
        assert_eq!(fstat(&file).expect("its length").st_size, 2 * 16448 + 64);
        assert_eq!(qemu.send(SET_INFLIGHT_FD, PLAIN, &area, vec![file]), "");
        for ring in 0..2 {
            assert_eq!(qemu.send(SET_VRING_CALL, PLAIN, &number(ring), vec![event()]), "");
        }
        assert_eq!(qemu.plain(SET_FEATURES, &number(features)), "");
        if !std::mem::replace(&mut has_memory, true) {
            assert_eq!(qemu.send(ADD_MEM_REG, NEED_REPLY, &region(), vec![memory()]), "reply 0x0");
        }
        for ring in 0..rings {
            assert_eq!(qemu.set_up(ring, base), "");
        }
        // QEMU 11.1 requests acknowledgements of these.
        for ring in 0..2 {
            let output = qemu.send(SET_VRING_ENABLE, NEED_REPLY, &pair(ring, 1), vec![]);
            // Also for a ring that was never set up.
            let started =
                if ring < rings { format!("start {ring} of 128 at {base}, ") } else { String::new() };
            assert_eq!(output, format!("{started}reply 0x0"));
        }
        assert_eq!(qemu.plain(SET_STATUS, &number(15)), "");
    };
    start(&mut qemu, firmware, 1, 0);

    // Shutdown or pause: the status is reset first, the base is requested last.
    let stop = |qemu: &mut SessionFrontEnd| {
        assert_eq!(qemu.plain(SET_STATUS, &number(0)), "stop 0");
        assert!(qemu.session.is_waiting_for_rings(), "for the requests in flight");
        assert_eq!(qemu.stopped(0, 77), "");
        assert_eq!(qemu.plain(SET_VRING_ENABLE, &pair(0, 0)), "");
        assert_eq!(qemu.plain(SET_VRING_ENABLE, &pair(1, 0)), "");
        assert_eq!(qemu.plain(GET_VRING_BASE, &pair(0, 0)), format!("reply {:#x}", 77_u64 << 32));
    };
    stop(&mut qemu);
    assert_eq!(qemu.plain(SET_FEATURES, &number(firmware)), "");
    start(&mut qemu, firmware, 1, 77);
    stop(&mut qemu);

    let linux = offered & !virtio::LOG_ALL & !virtio::RING_PACKED;
    assert_eq!(qemu.plain(SET_FEATURES, &number(linux)), "cache true");
    start(&mut qemu, linux, 2, 0);
    assert_eq!(
        qemu.send(
            SET_CONFIG,
            NEED_REPLY,
            &[config(32, 0)[..4].to_vec(), pair(1, 0), vec![0]].concat(),
            vec![]
        ),
        "cache false, reply 0x0"
    );
    assert_eq!(qemu.session.running().collect::<Vec<_>>(), [0, 1]);
    assert!(qemu.session.resize(1 << 20).is_some(), "the front end is notified");
    assert!(qemu.session.resize(1 << 20).is_none(), "once");
    assert_eq!(qemu.plain(GET_CONFIG, &config(0, 8)), "reply of 20");
    assert_eq!(qemu.payload[12..], (2048_u64).to_le_bytes());
}

/// libblkio: features before protocol features, single memory regions, everything acknowledged.
#[test]
fn libblkio() {
    use code::*;
    let mut blkio = SessionFrontEnd::new(offer());
    blkio.plain(SET_OWNER, &[]);
    blkio.plain(GET_FEATURES, &[]);
    assert_eq!(blkio.plain(SET_FEATURES, &number(FEATURES | virtio::EVENT_IDX)), "cache true");
    assert_eq!(blkio.plain(GET_PROTOCOL_FEATURES, &[]), "reply 0x1b22b");
    let needed = protocol::REPLY_ACK | protocol::CONFIG | protocol::CONFIGURE_MEM_SLOTS | protocol::MQ;
    assert_eq!(
        blkio.send(SET_PROTOCOL_FEATURES, NEED_REPLY, &number(needed), vec![]),
        "",
        "not negotiated yet"
    );
    assert_eq!(blkio.send(ADD_MEM_REG, NEED_REPLY, &region(), vec![memory()]), "reply 0x0");
    for (code, payload) in
        [(SET_VRING_NUM, pair(0, 256)), (SET_VRING_ADDR, addresses(0)), (SET_VRING_BASE, pair(0, 0))]
    {
        assert_eq!(blkio.send(code, NEED_REPLY, &payload, vec![]), "reply 0x0");
    }
    assert_eq!(blkio.send(SET_VRING_KICK, NEED_REPLY, &number(0), vec![event()]), "reply 0x0");
    assert_eq!(blkio.send(SET_VRING_CALL, NEED_REPLY, &number(0), vec![event()]), "reply 0x0");
    let output = blkio.send(SET_VRING_ENABLE, NEED_REPLY, &pair(0, 1), vec![]);
    assert_eq!(output, "start 0 of 256 at 0, reply 0x0");
    assert_eq!(
        blkio.send(REM_MEM_REG, NEED_REPLY, &numbers(&[0, 1, 2, 3, 0]), vec![]),
        "refused REM_MEM_REG: no such region: 2 bytes at 0x1, reply 0x1"
    );
}

/// Firecracker: one ring, no acknowledgements, sixty bytes of configuration.
#[test]
fn firecracker() {
    use code::*;
    let mut firecracker = SessionFrontEnd::new(offer());
    for code in [SET_OWNER, GET_FEATURES] {
        firecracker.plain(code, &[]);
    }
    firecracker.plain(GET_PROTOCOL_FEATURES, &[]);
    assert_eq!(firecracker.plain(SET_PROTOCOL_FEATURES, &number(protocol::CONFIG)), "");
    assert_eq!(firecracker.plain(GET_CONFIG, &config(0, 60)), "reply of 72");
    let features = virtio::PROTOCOL_FEATURES | virtio::VERSION_1 | virtio::EVENT_IDX | virtio::FLUSH;
    assert_eq!(firecracker.plain(SET_FEATURES, &number(features)), "cache true");
    assert_eq!(firecracker.send(SET_MEM_TABLE, PLAIN, &table(), vec![memory()]), "");
    assert_eq!(firecracker.plain(SET_VRING_NUM, &pair(0, 256)), "");
    assert_eq!(firecracker.plain(SET_VRING_ADDR, &addresses(0)), "");
    assert_eq!(firecracker.plain(SET_VRING_BASE, &pair(0, 0)), "");
    assert_eq!(firecracker.send(SET_VRING_CALL, PLAIN, &number(0), vec![event()]), "");
    assert_eq!(firecracker.send(SET_VRING_KICK, PLAIN, &number(0), vec![event()]), "");
    assert_eq!(firecracker.plain(SET_VRING_ENABLE, &pair(0, 1)), "start 0 of 256 at 0");
    assert!(firecracker.session.resize(1 << 20).is_none(), "it has no channel, and reads again by itself");
}

/// Cloud Hypervisor: bases are set first, the configuration is read at 0x100, and the owner is
/// reset when the guest restarts.
#[test]
fn cloud_hypervisor() {
    use code::*;
    let mut hypervisor = SessionFrontEnd::new(offer());
    hypervisor.plain(SET_OWNER, &[]);
    hypervisor.plain(GET_FEATURES, &[]);
    let features = FEATURES | virtio::MQ | virtio::EVENT_IDX | virtio::LOG_ALL;
    assert_eq!(hypervisor.plain(SET_FEATURES, &number(features)), "cache true");
    hypervisor.plain(GET_PROTOCOL_FEATURES, &[]);
    let chosen = protocol::OFFERED & !protocol::BACKEND_REQ;
    hypervisor.plain(SET_PROTOCOL_FEATURES, &number(chosen));
    hypervisor.plain(GET_QUEUE_NUM, &[]);
    assert_eq!(hypervisor.plain(GET_CONFIG, &config(0x100, 96)), "reply of 108");
    assert_eq!(hypervisor.payload[12..20], 100_u64.to_le_bytes(), "from the beginning");
    for ring in 0..2 {
        assert_eq!(hypervisor.plain(SET_VRING_BASE, &pair(ring, 0)), "");
    }
    assert_eq!(hypervisor.send(SET_MEM_TABLE, NEED_REPLY, &table(), vec![memory()]), "reply 0x0");
    for ring in 0..2 {
        assert_eq!(hypervisor.set_up(ring, 0), "");
        let start = format!("start {ring} of 128 at 0");
        assert_eq!(hypervisor.plain(SET_VRING_ENABLE, &pair(ring, 1)), start);
    }
    assert_eq!(hypervisor.plain(SET_VRING_ENABLE, &pair(0, 0)), "stop 0");
    assert_eq!(hypervisor.stopped(0, 5), "");
    assert_eq!(hypervisor.plain(RESET_OWNER, &[]), "stop 1");
    assert_eq!(hypervisor.stopped(1, 6), "");
    assert_eq!(hypervisor.plain(GET_VRING_BASE, &pair(1, 0)), format!("reply {:#x}", 6_u64 << 32 | 1));
    for ring in 0..2 {
        // The second ring was never disabled.
        let output = hypervisor.set_up(ring, 0) + &hypervisor.plain(SET_VRING_ENABLE, &pair(ring, 1));
        assert_eq!(output, format!("start {ring} of 128 at 0"));
    }
}
