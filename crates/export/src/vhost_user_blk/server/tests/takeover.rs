//! Front ends that are quiesced, and continue at another server or at the same.

use super::*;

/// Transfers a quiesced front end from one server to another.
fn transfer(
    front_end: &SocketFrontEnd,
    first: &VhostUserServer,
    second: &Arc<VhostUserServer>,
) -> JoinHandle<()> {
    second.adopt(first.take_quiesced().expect("it is at rest")).expect("the same export");
    attend(second, front_end.socket.clone())
}

#[test]
fn a_transfer_to_another_server_is_invisible_to_the_front_end() {
    real(async {
        let (first, second) =
            (server(one_request_per_second(LimitKind::IopsTotal)), server(Limits::default()));
        let mut front_end = SocketFrontEnd::connect(&first).await;
        let (channel, mut notifications) = UnixStream::pair().expect("sockets");
        front_end.request_acknowledged(code::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]).await;
        assert_eq!(front_end.capacity().await, (1 << 20) / 512);
        let (area, bytes) = crate::vhost_user_blk::inflight::create(2, SIZE, false).expect("made");
        let info = [numbers(&[bytes, 0]), [2, SIZE].map(u16::to_ne_bytes).concat()].concat();
        front_end.request_acknowledged(code::SET_INFLIGHT_FD, &info, &[area.as_fd()]).await;
        front_end
            .request_acknowledged(
                code::SET_CONFIG,
                &[&[32, 1, 0].map(u32::to_ne_bytes).concat()[..], &[0]].concat(),
                &[],
            )
            .await;
        let mut ring = front_end.start(1, event(0), event(0)).await;
        let requests: Vec<_> =
            (0..10).map(|number| front_end.request(&mut ring, 1, number * 100, &[1; 512])).collect();
        ring.kick_and_wait().await;

        assert!(first.quiesce(TEST_TIMEOUT).await);
        assert_eq!((first.statistics().queues, first.connections()), (0, 1));
        let waiting =
            |front_end: &SocketFrontEnd| requests.iter().filter(|at| front_end.data(**at).1 == GUARD).count();
        assert!(waiting(&front_end) > 0, "some wait for the limit, and go back");
        // A request that arrives in between is found by the second server.
        let late = front_end.request(&mut ring, 1, 1, &[7; 512]);
        ring.kick();
        let served = transfer(&front_end, &first, &second);
        assert!(first.take_quiesced().is_none(), "it goes once");
        while waiting(&front_end) > 0 || front_end.data(late).1 == GUARD {
            reactor::yield_now().await;
        }
        assert_eq!(second.device.durability(), storage::Durability::Synchronous, "as the guest chose");
        notifications.set_nonblocking(true).expect("a socket");
        assert!(notifications.read(&mut [0; 12]).is_err(), "it knows the disk's length");
        drop((front_end.socket, served));
    });
}

#[test]
fn quiesced_front_end_resumes() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let message = [code::GET_FEATURES, 1, 0].map(u32::to_ne_bytes).concat();
        let (half, rest) = message.split_at(5);
        let send = |bytes: &[u8]| rustix::io::write(&front_end.socket, bytes).expect("there is room");
        send(half);
        assert!(server.quiesce(TEST_TIMEOUT).await, "whatever it is about to say");
        server.resume();
        send(rest);
        front_end.receive_reply(code::GET_FEATURES).await;
        assert!(server.quiesce(TEST_TIMEOUT).await);
        let at = front_end.request(&mut ring, 1, 0, &[1; 512]);
        ring.kick();
        assert!(server.quiesce(TEST_TIMEOUT).await && front_end.data(at).1 == GUARD);
        server.resume();
        ring.look().await;
        assert_eq!(front_end.data(at).1, 0);
        assert!(server.take_quiesced().is_none());
        front_end.leave().await;
    });
}

#[test]
fn requests_that_cannot_go_back_are_admitted_at_once_in_an_upgrade() {
    real(async {
        // Quiesced at once, or after the front end has requested the ring's base.
        for stop_requested in [false, true] {
            let server = server(one_request_per_second(LimitKind::IopsWrite));
            let mut front_end = SocketFrontEnd::connect(&server).await;
            let mut ring = front_end.start(0, event(0), event(0)).await;
            // Together with the read, as many as fit into the ring.
            let writes: Vec<_> =
                (0..9).map(|number| front_end.request(&mut ring, 1, number * 100, &[1; 512])).collect();
            // Reads have no limit. Its completion keeps the earlier entries from going back into
            // the ring.
            let read = front_end.request(&mut ring, 0, 1, &[0; 512]);
            ring.kick();
            while front_end.data(read).1 == GUARD {
                reactor::yield_now().await;
            }
            let waiting = |front_end: &SocketFrontEnd| {
                writes.iter().filter(|at| front_end.data(**at).1 == GUARD).count()
            };
            assert!(waiting(&front_end) > 5);
            if stop_requested {
                front_end.send(code::GET_VRING_BASE, 1, &[0_u32, 0].map(u32::to_ne_bytes).concat(), &[]);
                // Time for the server to receive the message before it quiesces.
                reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
            }
            assert!(server.quiesce(TEST_TIMEOUT).await);
            assert_eq!(waiting(&front_end), 0, "they are carried out");
            assert_eq!(server.device.disk().throttle().stats().writes.requests, 9, "and are charged");
            drop((front_end.socket, front_end.served));
        }
    });
}

#[test]
fn an_incomplete_message_is_transferred() {
    real(async {
        let other = memory_file(MEMORY_BYTES);
        let region = [0, 1 << 32, MEMORY_BYTES, 1 << 40, 0].map(u64::to_ne_bytes).concat();
        let message = [[code::ADD_MEM_REG, 9, 40].map(u32::to_ne_bytes).concat(), region].concat();
        for half in [1, 11, 12, 13, message.len() - 1] {
            let (first, second) = (server(Limits::default()), server(Limits::default()));
            let front_end = SocketFrontEnd::connect(&first).await;
            send_with(&front_end.socket, &message[..half], &[other.as_fd()]);
            // Time for the server to receive the bytes before it quiesces.
            reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
            assert!(first.quiesce(TEST_TIMEOUT).await);
            let served = transfer(&front_end, &first, &second);
            rustix::io::write(&front_end.socket, &message[half..]).expect("there is room");
            assert_eq!(front_end.receive_reply(code::ADD_MEM_REG).await, [0; 8], "with its descriptor");
            drop((front_end.socket, served));
        }
    });
}

#[test]
fn modified_files_are_distinguished_from_missing_features() {
    real(async {
        type Damage = fn(&OwnedFd);
        let spoils: [(Damage, VhostUserOffer, bool); 4] = [
            (
                |file| ftruncate(file, 0).expect("it may"),
                VhostUserOffer { queues: 2, ..VhostUserOffer::default() },
                true,
            ),
            (|file| ftruncate(file, MEMORY_BYTES - 1).expect("it may"), VhostUserOffer::default(), true),
            (
                |file| fcntl_add_seals(file, SealFlags::FUTURE_WRITE).expect("it may"),
                VhostUserOffer::default(),
                true,
            ),
            (|_| {}, VhostUserOffer { queue_size: 16, ..VhostUserOffer::default() }, false),
        ];
        for (damage, offer, is_modified_file) in spoils {
            let first = server(Limits::default());
            let front_end = SocketFrontEnd::connect(&first).await;
            front_end.start(0, event(0), event(0)).await;
            assert!(first.quiesce(TEST_TIMEOUT).await);
            damage(&front_end.file);
            let messages = first.take_quiesced().expect("it is at rest").messages;
            let why = VhostUserSession::from_messages(offer, messages).expect_err("it cannot be");
            assert_eq!(why.is_modified_file(), is_modified_file, "{why}");
            drop((front_end.socket, front_end.served));
        }
    });
}
