#!/usr/bin/perl -T
# The storage plugin for Proxmox VE with a real daemon: each method, bad input, volumes in use, and
# a daemon that is killed between steps. The classes of Proxmox VE are stand-ins (lib/PVE), written
# from the documented interface.
#
# Run with `prove -Ilib -I…/packaging/proxmox`; WEIR is the path of weir.

use v5.36;

use IO::Socket::UNIX;
use POSIX ();
use Test::More;

use Site;

use constant PLUGIN => 'PVE::Storage::Custom::WeirPlugin';
use constant MIB    => 1 << 20;

# The error of a call, or undef.
sub error_of ($call) {
    return eval { $call->(); 1 } ? undef : $@;
}

sub dies_with ($call, $pattern, $name) {
    my $error = error_of($call);
    return like($error // 'no error', $pattern, $name);
}

subtest 'versions of the interface' => sub {
    is PLUGIN->api, 15, 'the newest one alone';
    for my $case ([10, 12], [12, 12], [13, 13], [15, 15], [16, 15]) {
        my ($host, $offered) = @$case;
        no warnings 'once';
        local *PVE::Storage::APIVER = sub { $host };
        is PLUGIN->api, $offered, "Proxmox VE with version $host";
    }
    is PLUGIN->type, 'weir', 'type';
    is_deeply PLUGIN->plugindata->{format}, [{ raw => 1 }, 'raw'], 'formats';
};

subtest 'configuration' => sub {
    my %good = ('weir-pool' => '/srv/pool');
    my $check = sub (%more) { return PLUGIN->check_config('fast', { %good, %more }, 1) };
    is $check->()->{'weir-pool'}, '/srv/pool', 'the pool alone';
    ok $check->(
        'weir-socket' => '/run/weir/nbd.sock', 'weir-control' => '/run/weir/qmp.sock',
        'weir-format' => 'raw', 'weir-iops-total' => 500, 'weir-bps-total' => '100M',
        'weir-weight' => 200, 'weir-group' => 'gold', nodes => 'a', content => 'images',
        ),
        'all properties';
    my @bad = (
        ['weir-pool',       'pool',              qr{absolute}],
        ['weir-pool',       '/srv/a b',          qr{weir-pool: /srv/a b: must be an absolute path}],
        ['weir-pool',       '/srv/../etc',       qr{without \.\.}],
        ['weir-socket',     '/run/a,read-only',  qr{must be an absolute path}],
        ['weir-socket',     '/run/a?b',          qr{must be an absolute path}],
        ['weir-control',    '/' . 'a' x 107,     qr{longer than 107}],
        ['weir-iops-total', 0,                   qr{below 1}],
        ['weir-bps-total',  'fast',              qr{number of bytes}],
        ['weir-bps-total',  '0',                 qr{number of bytes}],
        ['weir-weight',     10001,               qr{above 10000}],
        ['weir-group',      '-x',                qr{weir-group: -x}],
        ['weir-format',     'vmdk',              qr{not one of}],
        ['shared',          1,                   qr{unexpected}],
    );
    for my $case (@bad) {
        my ($key, $value, $pattern) = @$case;
        dies_with(sub { $check->($key => $value) }, $pattern, "$key = $value");
    }
    my ($directory) = __FILE__ =~ m{\A(.*/)?[^/]+\z};
    open my $guide, '<', ($directory // '') . '../../docs/proxmox.md' or die "the guide: $!\n";
    my $text = do { local $/ = undef; <$guide> };
    my ($example) = $text =~ m{^weir: fast\n((?:    .+\n)+)}m;
    my %example = $example =~ m{^    (\S+) (.+)$}gm;
    is_deeply $check->(%example), \%example, 'the example of the guide';
    ok $text =~ m{^\|.*`$_`}m, "the guide describes $_" for sort keys PLUGIN->properties->%*;

    dies_with(sub { PLUGIN->path({}, 'vm-1-a') && PLUGIN->status('fast', {}) },
        qr{weir-pool: not set}, 'no pool');
};

subtest 'names of volumes' => sub {
    is_deeply [PLUGIN->parse_volname('vm-100-disk-0')],
        ['images', 'vm-100-disk-0', 100, undef, undef, undef, 'raw'], 'a disk';
    is_deeply [PLUGIN->parse_volname('base-100-disk-0/vm-101-disk-1')],
        ['images', 'vm-101-disk-1', 101, 'base-100-disk-0', 100, undef, 'raw'], 'a linked clone';
    is_deeply [PLUGIN->parse_volname('base-100-disk-0')],
        ['images', 'base-100-disk-0', 100, undef, undef, 1, 'raw'], 'a base image';
    for my $name ('', 'disk', 'vm-x-disk', '../vm-1-a', 'vm-1-../a', "vm-1-a\n", 'vm-1-a/vm-2-b',
        'vm-1-a;b', 'vm-1--b', 'base-1-a/../vm-2-b')
    {
        dies_with(sub { PLUGIN->parse_volname($name) }, qr{not a volume of weir}, "'$name'");
    }
};

subtest 'storage' => sub {
    my $site = Site->new;
    dies_with(sub { $site->call_id_first('activate_storage') }, qr{no daemon listens},
        'without a daemon');
    my ($total, $available, $used, $active) = $site->call_id_first('status');
    ok $total > 0 && $available <= $total && !$active, 'status without a daemon';
    $site->start;
    ok $site->call_id_first('activate_storage'), 'with a daemon';
    ok $site->call_id_first('activate_storage'), 'and again';
    is +($site->call_id_first('status'))[3], 1, 'active';
    {
        local $site->{scfg}{'weir-socket'} = '/run/weir/other.sock';
        dies_with(sub { $site->call_id_first('activate_storage') }, qr{does not serve NBD there},
            'another socket');
    }
    {
        local $site->{scfg}{'weir-pool'} = "$site->{root}/missing";
        dies_with(sub { $site->call_id_first('activate_storage') }, qr{not a directory},
            'no pool');
    }
    is $site->stop, 0, 'the daemon ends cleanly';
};

subtest 'a volume from begin to end' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    is $volume, 'vm-100-disk-0', 'the first name';
    is $site->alloc, 'vm-100-disk-1', 'the next name';
    is $site->alloc(100, 'vm-100-cloudinit', 4096), 'vm-100-cloudinit', 'a given name';
    is_deeply $site->served, [], 'none is served';
    is $site->call('volume_size_info', $volume), 64 * MIB, 'size';
    is_deeply [($site->call('volume_size_info', $volume))[0, 1]], [64 * MIB, 'raw'], 'and format';
    is sprintf('%o', (stat $site->file("$volume.qcow2"))[2] & 07777), 600, 'mode';

    ok $site->activate($volume), 'activate';
    ok $site->activate($volume, undef, {}, { hint => 1 }, 'more'), 'again';
    is_deeply $site->served, [$volume], 'is served';
    ok $site->qemu_io($volume, 'write -P 7 1M 1M'), 'written through its path';
    like $site->read('weir.toml'), qr{\[disk\.$volume\]}, 'saved';

    my $options = $site->call('qemu_blockdev_options', $volume, '10.0+pve0', {});
    my @flat = map {
        my $value = $options->{$_};
        ref $value ? map { "server.$_=$value->{$_}" } sort keys %$value : "$_=$value"
    } sort keys %$options;
    open my $qemu, '-|', 'qemu-io', '-c', 'read -P 7 1M 1M', '--image-opts', join ',', @flat;
    my $output = do { local $/ = undef; <$qemu> };
    like $output, qr{read 1048576/1048576}, 'QEMU opens it with these options';
    unlike $output, qr{verification failed}, 'and reads the data';
    ok close $qemu, 'and succeeds';

    my ($path, $vmid, $type) = PLUGIN->path($site->{scfg}, $volume, 'fast');
    is_deeply [$path, $vmid, $type],
        ["nbd+unix:///$volume?socket=$site->{root}/nbd.sock", 100, 'images'], 'path';
    is scalar PLUGIN->filesystem_path($site->{scfg}, $volume), $site->file("$volume.qcow2"), 'file';

    my $images = $site->call_id_first('list_images', undef, undef, {});
    is_deeply [map { $_->{volid} } @$images],
        ['fast:vm-100-cloudinit', 'fast:vm-100-disk-0', 'fast:vm-100-disk-1'], 'all volumes';
    is_deeply [$images->[1]->@{qw(vmid format size parent)}], [100, 'raw', 64 * MIB, undef],
        'one of them';
    ok $images->[1]{used} >= MIB && $images->[1]{ctime} > 0, 'its space and age';
    is @{ $site->call_id_first('list_images', 101) }, 0, 'none of another machine';
    is @{ $site->call_id_first('list_images', undef, ['fast:vm-100-disk-1']) }, 1, 'one by name';

    ok $site->deactivate($volume), 'deactivate';
    ok $site->deactivate($volume), 'again';
    is_deeply $site->served, [], 'is not served';
    unlike $site->read('weir.toml'), qr{\[disk\.vm}, 'nor saved';
    ok $site->activate($volume) && $site->qemu_io($volume, 'read -P 7 1M 1M'), 'the data stays';
    is $site->call_id_first('free_image', $volume, 0, 'raw'), undef, 'free, while active';
    ok !-e $site->file("$volume.qcow2"), 'the image is removed';
    is_deeply $site->served, [], 'the disk too';
    {
        my @warnings;
        local $SIG{__WARN__} = sub ($warning) { push @warnings, $warning };
        is $site->call_id_first('free_image', $volume, 0, 'raw'), undef, 'free again';
        like "@warnings", qr{has no image any more}, 'with a warning';
    }
    ok $site->deactivate($volume), 'deactivate what does not exist';
    is $site->alloc, $volume, 'its name is free';
    ok $site->activate($volume) && $site->qemu_io($volume, 'read -P 0 0 64M'), 'and it is empty';
    is $site->stop, 0, 'the daemon ends cleanly';
};

subtest 'bad input of volumes' => sub {
    my $site = Site->new->start;
    my $alloc = sub (@arguments) {
        return sub { $site->call_id_first('alloc_image', @arguments) };
    };
    dies_with($alloc->(100, 'qcow2', undef, 1024), qr{qcow2: not a format}, 'format');
    dies_with($alloc->(100, 'raw', 'vm-101-disk-0', 1024), qr{must be named vm-100-}, 'other VM');
    dies_with($alloc->(100, 'raw', 'vm-100-../x', 1024), qr{must be named vm-100-}, 'path');
    dies_with($alloc->('1 0', 'raw', undef, 1024), qr{not the number of a machine}, 'number');
    dies_with($alloc->(100, 'raw', undef, 0), qr{not a size}, 'no size');
    dies_with($alloc->(100, 'raw', 'vm-100-state-' . 'a' x 19, 1024), qr{longer than the 31},
        'a long name');
    dies_with($alloc->(100, 'raw', undef, '9' x 18), qr{.}, 'a size that no image has');
    is_deeply [glob "$site->{root}/pool/* $site->{root}/pool/.*new"], [], 'nothing is left';

    $site->alloc(100, 'vm-100-disk-0');
    dies_with($alloc->(100, 'raw', 'vm-100-disk-0', 1024), qr{already exists}, 'the name is used');
    is $site->call('volume_size_info', 'vm-100-disk-0'), 64 * MIB, 'and the image unchanged';
    $site->write('pool/vm-100-disk-0.raw', 'x');
    dies_with(sub { $site->activate('vm-100-disk-0') }, qr{both vm-100-disk-0.qcow2 and},
        'two images of one volume');
    unlink $site->file('vm-100-disk-0.raw');

    dies_with(sub { $site->activate('vm-100-disk-9') }, qr{no image in}, 'no image');
    dies_with(sub { $site->activate('vm-100-disk-0', 'snap') }, qr{cannot be opened}, 'snapshot');
    $site->write('pool/vm-100-disk-3.qcow2', 'not an image');
    dies_with(sub { $site->activate('vm-100-disk-3') }, qr{vm-100-disk-3}, 'damaged');
    {
        my @warnings;
        local $SIG{__WARN__} = sub ($warning) { push @warnings, $warning };
        my $images = $site->call_id_first('list_images');
        is_deeply [map { $_->{size} } @$images], [64 * MIB, 0], 'a damaged image is listed';
        is @warnings, 1, 'with a warning';
    }
    dies_with(sub { $site->call_id_first('free_image', 'vm-100-disk-0') }, qr{vm-100-disk-3},
        'an unreadable image might be an overlay');
    ok -e $site->file('vm-100-disk-0.qcow2'), 'so its backing file stays';
    is $site->call_id_first('free_image', 'vm-100-disk-3'), undef, 'the damaged one can be removed';

    my $weir = sub (@command) {
        PVE::Storage::Custom::Weir::Command::weir($site->{scfg}, @command);
    };
    $weir->('disk', 'add', 'mine', $site->file('vm-100-disk-0.qcow2'), '-f', 'qcow2');
    for my $method (qw(activate_volume free_image)) {
        dies_with(sub { $site->call_id_first($method, 'vm-100-disk-0') },
            qr{serves it as the disk mine}, "$method of an image of another disk");
    }
    ok -e $site->file('vm-100-disk-0.qcow2'), 'the image stays';
    $weir->('disk', 'remove', 'mine');

    # Another storage of this host whose volumes have the same names.
    mkdir "$site->{root}/pool/other" or die;
    my $other = { $site->{scfg}->%*, 'weir-pool' => "$site->{root}/pool/other" };
    PLUGIN->alloc_image('slow', $other, 100, 'raw', 'vm-100-disk-0', 1024);
    $site->activate('vm-100-disk-0');
    dies_with(sub { PLUGIN->activate_volume('slow', $other, 'vm-100-disk-0') },
        qr{needs a daemon of its own}, 'two storages at one daemon');
    dies_with(sub { PLUGIN->deactivate_volume('slow', $other, 'vm-100-disk-0') },
        qr{needs a daemon of its own}, 'which do not stop the disk of the other');
    is_deeply $site->served, ['vm-100-disk-0'], 'it is served';
};

subtest 'a volume in use' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    $site->call('volume_snapshot', $volume, 'before');
    $site->activate($volume);
    my $client = $site->client($volume);
    my %refused = (
        'deactivate' => sub { $site->deactivate($volume) },
        'free'       => sub { $site->call_id_first('free_image', $volume) },
        'rename'     => sub { $site->call('rename_volume', $volume, 101, undef) },
        'roll back'  => sub { $site->call('volume_snapshot_rollback', $volume, 'before') },
    );
    dies_with($refused{$_}, qr{in use}, $_) for sort keys %refused;
    ok $site->activate($volume), 'activate';
    is_deeply $site->served, [$volume], 'it is served';
    ok -e $site->file("$volume.qcow2"), 'the image is there';
    dies_with(sub { $site->call('volume_resize', $volume, 128 * MIB, 1) }, qr{stop it first},
        'resize while the machine runs');
    is $site->disk($volume)->{size}, 64 * MIB, 'the size is unchanged';
    $site->close_client($client);
    ok $site->deactivate($volume), 'deactivate at once after the client has ended';
};

subtest 'size' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    $site->call('volume_resize', $volume, 96 * MIB, undef);
    is $site->call('volume_size_info', $volume), 96 * MIB, 'of an inactive volume';
    $site->activate($volume);
    $site->call('volume_resize', $volume, 128 * MIB, undef);
    is $site->disk($volume)->{size}, 128 * MIB, 'of an active volume';
    $site->call('volume_resize', $volume, 128 * MIB, undef);
    is $site->call('volume_size_info', $volume), 128 * MIB, 'the same again';
    dies_with(sub { $site->call('volume_resize', $volume, 64 * MIB, undef) }, qr{would lose},
        'smaller');
    dies_with(sub { $site->call('volume_resize', $volume, 256 * MIB, undef, 'snap') },
        qr{keeps its size}, 'a snapshot');
};

subtest 'snapshots' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    is $site->call_id_first('volume_qemu_snapshot_method', $volume), 'storage', 'by the storage';
    $site->activate($volume);
    $site->qemu_io($volume, 'write -P 1 0 1M');
    $site->deactivate($volume);
    $site->call('volume_snapshot', $volume, 'one');
    dies_with(sub { $site->call('volume_snapshot', $volume, 'one') }, qr{already}, 'one twice');
    for my $name ('1', 'a b', '-d', '', "a\n") {
        dies_with(sub { $site->call('volume_snapshot', $volume, $name) }, qr{not a name},
            "'$name'");
    }
    $site->activate($volume);
    $site->qemu_io($volume, 'write -P 2 0 1M');

    my $info = $site->call('volume_snapshot_info', $volume);
    is_deeply [keys %$info], ['one'], 'listed while active';
    like $info->{one}{id}, qr{\A1-\d+-\d+\z}, 'id';
    ok $info->{one}{timestamp} > 1_000_000_000, 'time';
    ok $site->call('volume_rollback_is_possible', $volume, 'one'), 'can be restored';
    dies_with(sub { $site->call('volume_rollback_is_possible', $volume, 'two') },
        qr{no snapshot two}, 'another cannot');
    dies_with(sub { $site->call('volume_snapshot_rollback', $volume, 'two') }, qr{no snapshot two},
        'nor is it tried');
    is_deeply $site->served, [$volume], 'the disk is still served';

    $site->call('volume_snapshot', $volume, 'live');
    ok $site->call('volume_snapshot_info', $volume)->{live}, 'a snapshot of an active volume';
    $site->qemu_io($volume, 'write -P 3 0 1M');
    $site->call('volume_snapshot_delete', $volume, 'one', 1);
    is_deeply [keys $site->call('volume_snapshot_info', $volume)->%*], ['live'],
        'another is deleted while active';
    $site->call('volume_snapshot_rollback', $volume, 'live');
    is_deeply $site->served, [], 'a rollback makes the volume inactive';
    $site->activate($volume);
    ok $site->qemu_io($volume, 'read -P 2 0 1M'), 'old content';
    $site->deactivate($volume);
    $site->call('volume_snapshot_delete', $volume, $_) for keys $site->call('volume_snapshot_info',
        $volume)->%*;
    is_deeply $site->call('volume_snapshot_info', $volume), {}, 'deleted';
    is $site->call('volume_snapshot_delete', $volume, 'one'), undef, 'and again';

    local $site->{scfg}{'weir-format'} = 'raw';
    my $raw = $site->alloc;
    ok -e $site->file("$raw.raw"), 'a raw image';
    dies_with(sub { $site->call('volume_snapshot', $raw, 'one') }, qr{no snapshots}, 'has none');
    is_deeply $site->call('volume_snapshot_info', $raw), {}, 'nor lists any';
    ok $site->activate($raw) && $site->qemu_io($raw, 'write -P 5 0 4k'), 'and is served';
    $site->deactivate($raw);
    # A guest writes the header of a qcow2 image.
    open my $qcow2, '<', $site->file("$volume.qcow2") or die;
    sysread $qcow2, my $header, 4096;
    open my $disk, '+<', $site->file("$raw.raw") or die;
    syswrite $disk, $header;
    $site->call('volume_resize', $raw, 96 * MIB, undef);
    is $site->call('volume_size_info', $raw), 96 * MIB, 'a raw image stays raw';
    is -s $site->file("$raw.raw"), 96 * MIB, 'whatever a guest writes';
};

# A server at the control socket: it sends the first of `parts` at once, and each further one after
# a line was received.
sub control_server ($site, @parts) {
    my $listener = IO::Socket::UNIX->new(Local => "$site->{root}/qmp.sock", Listen => 1) or die;
    my $pid      = fork // die "fork: $!\n";
    if (!$pid) {
        my $client = $listener->accept;
        for my $part (@parts) {
            print {$client} $part;
            $client->flush;
            my $line = <$client> // last;
        }
        POSIX::_exit(0);
    }
    return $pid;
}

subtest 'the control socket' => sub {
    my $greeting = qq({"QMP": {"version": {}, "capabilities": []}}\n);
    my $snapshot = sub (@parts) {
        my $site = Site->new;
        my $pid  = control_server($site, @parts);
        my $result = eval {
            PVE::Storage::Custom::Weir::Command::qmp(
                $site->{scfg}, 'blockdev-snapshot-internal-sync', device => 'a', name => 'b');
        };
        my $error = $@;
        waitpid $pid, 0;
        return ($result, $error);
    };
    my $event = qq({"event": "X_WEIR_EVENT", "data": {}}\n);
    my ($result, $error) = $snapshot->(
        $greeting, qq({"return": {}}\n), $event x 2 . qq({"return": {"id": "7"}}\n));
    is_deeply $result, { id => 7 }, 'a result after events' or diag $error;
    (undef, $error) = $snapshot->($greeting, qq({"return": {}}\n),
        qq({"error": {"class": "GenericError", "desc": "no space"}}\n));
    is $error, "blockdev-snapshot-internal-sync: no space\n", 'an error';
    (undef, $error) = $snapshot->($greeting);
    like $error, qr{closed the connection}, 'a daemon that ends';
    my $site = Site->new;
    dies_with(
        sub { PVE::Storage::Custom::Weir::Command::qmp($site->{scfg}, 'query-version') },
        qr{no daemon answers there}, 'no daemon');
};

subtest 'templates and linked clones' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    $site->activate($volume);
    $site->qemu_io($volume, 'write -P 9 0 1M');
    dies_with(sub { $site->call('clone_image', $volume, 101, undef) }, qr{need a base image},
        'of an ordinary volume');
    $site->deactivate($volume);
    $site->call('volume_snapshot', $volume, 'one');
    dies_with(sub { $site->call_id_first('create_base', $volume) }, qr{has snapshots},
        'a base image with snapshots');
    $site->call('volume_snapshot_delete', $volume, 'one');
    $site->activate($volume);
    my $base = $site->call_id_first('create_base', $volume);
    is $base, 'base-100-disk-0', 'a base image';
    is_deeply $site->served, [], 'which is not served';
    dies_with(sub { $site->call_id_first('create_base', $base) }, qr{already}, 'once');
    dies_with(sub { $site->call('volume_resize', $base, 128 * MIB, undef) }, qr{keeps its size},
        'it keeps its size');
    dies_with(sub { $site->call('rename_volume', $base, 101, undef) }, qr{keeps its name},
        'and name');

    dies_with(sub { $site->call('clone_image', $base, 101, 'snap') }, qr{need a base},
        'of a snapshot');
    my $clone = PLUGIN->clone_image($site->{scfg}, 'fast', $base, 101, undef);
    is $clone, 'base-100-disk-0/vm-101-disk-0', 'a linked clone';
    is +($site->call('volume_size_info', $clone))[3], $base, 'knows its base';
    ok $site->activate($clone) && $site->activate($base), 'both are served';
    ok $site->qemu_io($clone, 'read -P 9 0 1M'), 'the clone has the content';
    ok $site->qemu_io($clone, 'write -P 8 0 1M'), 'and can be changed';
    ok !$site->qemu_io($base, 'write -P 8 0 1M'), 'the base image cannot';
    ok $site->qemu_io($base, 'read -P 9 0 1M'), 'and is unchanged';
    my ($listed) = grep { $_->{vmid} == 101 } @{ $site->call_id_first('list_images') };
    is_deeply [$listed->@{qw(volid parent)}], ["fast:$clone", $base], 'listed with its base';

    dies_with(sub { $site->call_id_first('free_image', $base) }, qr{backing file of vm-101-disk-0},
        'a base image with clones stays');
    $site->deactivate($clone);
    rename $site->file('vm-101-disk-0.qcow2'), $site->file('vm-101-disk-0.snap-1.qcow2') or die;
    is @{ $site->call_id_first('list_images') }, 1, 'a file with another name is no volume';
    dies_with(sub { $site->call_id_first('free_image', $base) },
        qr{backing file of vm-101-disk-0.snap-1}, 'but needs its backing file');
    rename $site->file('vm-101-disk-0.snap-1.qcow2'), $site->file('vm-101-disk-0.qcow2') or die;
    my $renamed = $site->call('rename_volume', $clone, 102, undef);
    is $renamed, 'fast:base-100-disk-0/vm-102-disk-0', 'a clone gets another owner';
    $site->call_id_first('free_image', 'base-100-disk-0/vm-102-disk-0');
    is $site->call_id_first('free_image', $base), undef, 'then the base image can be removed';
    is_deeply [glob $site->file('*')], [], 'the pool is empty';
};

subtest 'another owner' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    $site->call('update_volume_attribute', $volume, 'notes', 'iops-total=500');
    $site->alloc(101);
    is $site->call('rename_volume', $volume, 101, undef), 'fast:vm-101-disk-1', 'a free name';
    is $site->call('get_volume_attribute', 'vm-101-disk-1', 'notes'), 'iops-total=500',
        'with its notes';
    dies_with(sub { $site->call('rename_volume', 'vm-101-disk-1', undef, 'vm-101-disk-0') },
        qr{already exists}, 'a used name');
    dies_with(sub { $site->call('rename_volume', 'vm-101-disk-1', undef, 'x') }, qr{not a volume},
        'not a name');
    dies_with(sub { $site->call('rename_volume', 'vm-109-disk-1', 110, undef) }, qr{no image},
        'no image');
    is_deeply [glob $site->file('*')],
        [map { $site->file($_) }
            qw(vm-101-disk-0.qcow2 vm-101-disk-1.limits vm-101-disk-1.qcow2)],
        'the files';
};

subtest 'features' => sub {
    my $site = Site->new->start;
    $site->alloc;
    $site->alloc(101);
    $site->call_id_first('create_base', 'vm-101-disk-0');
    local $site->{scfg}{'weir-format'} = 'raw';
    $site->alloc(102);
    my $has = sub ($feature, $volume, $snap = undef, $opts = undef) {
        return PLUGIN->volume_has_feature($site->{scfg}, $feature, 'fast', $volume, $snap, 0, $opts)
            ? 1 : 0;
    };
    my %expected = (
        'vm-100-disk-0'   => 'copy rename snapshot sparseinit template',
        'base-101-disk-0' => 'clone copy sparseinit',
        'vm-102-disk-0'   => 'copy rename sparseinit template',
    );
    for my $volume (sort keys %expected) {
        my @has = grep { $has->($_, $volume) }
            qw(clone copy rename replicate snapshot sparseinit template unknown);
        is "@has", $expected{$volume}, $volume;
    }
    is $has->('copy', 'vm-100-disk-0', 'snap'), 0, 'a snapshot cannot be copied';
    is $has->('clone', 'base-101-disk-0', undef, { valid_target_formats => ['qcow2'] }), 0,
        'a clone is not qcow2 for QEMU';
    is_deeply [PLUGIN->volume_export_formats($site->{scfg}, 'fast', 'vm-100-disk-0')], [],
        'no export';
};

subtest 'limits' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    my $limits = sub { return $site->disk($volume)->{limits} };
    my $set = sub ($notes) { $site->call('update_volume_attribute', $volume, 'notes', $notes) };

    $site->{scfg}->@{qw(weir-iops-total weir-bps-total weir-weight weir-group)} =
        (500, '100M', 200, 'gold');
    $site->activate($volume);
    is_deeply $limits->(), { 'iops-total' => 500, 'bps-total' => 100 * MIB }, 'of the storage';
    is_deeply [$site->disk($volume)->@{qw(weight group)}], [200, 'gold'], 'weight and group';

    $set->("iops-read=300,iops-read-max=600 iops-read-max-length=10\nweight=50");
    is_deeply $limits->(),
        { 'iops-read' => 300, 'iops-read-max' => 600, 'iops-read-max-length' => 10 },
        'of the notes, at once';
    is_deeply [$site->disk($volume)->@{qw(weight group)}], [50, undef], 'the group too';
    like $site->read('weir.toml'), qr{iops-read = 300}, 'saved';
    like $site->call('get_volume_attribute', $volume, 'notes'), qr{weight=50}, 'readable';
    $site->deactivate($volume);
    $site->activate($volume);
    is $limits->()->{'iops-read'}, 300, 'after the next start of the machine';

    my @bad = (
        ['fast',                           qr{fast: not a setting}],
        ['iops=500',                       qr{iops: not a setting}],
        ['image=/etc/shadow',              qr{not a setting}],
        ['iops-total=1 iops-total=2',      qr{set twice}],
        ['iops-total=--save',              qr{.}],
        ['iops-total=5,iops-read=5',       qr{iops}],
        ['iops-total-max=5',               qr{iops-total-max}],
        ['group=missing',                  qr{missing}],
    );
    for my $active (1, 0) {
        $site->deactivate($volume) if !$active;
        for my $case (@bad) {
            my ($notes, $pattern) = @$case;
            dies_with(sub { $set->($notes) }, $pattern, "$notes, active: $active");
        }
        like $site->call('get_volume_attribute', $volume, 'notes'), qr{iops-read=300}, 'unchanged';
        is_deeply $site->served, $active ? [$volume] : [], 'served as before';
    }
    $site->activate($volume);
    is $limits->()->{'iops-read'}, 300, 'the limit too';
    $set->('');
    is_deeply $limits->(), { 'iops-total' => 500, 'bps-total' => 100 * MIB },
        'without notes, those of the storage';
    is $site->call('get_volume_attribute', $volume, 'notes'), '', 'no notes';
    is $site->call('get_volume_attribute', $volume, 'protected'), undef, 'no other attribute';
    dies_with(sub { $site->call('update_volume_attribute', $volume, 'protected', 1) },
        qr{only notes}, 'nor can it be set');
    $set->('iops-total=7');
    $site->call_id_first('free_image', $volume);
    is_deeply [glob $site->file('*')], [], 'notes end with the volume';
};

subtest 'the daemon is killed between steps' => sub {
    my $site = Site->new->start;
    my $volume = $site->alloc;
    $site->crash;
    dies_with(sub { $site->activate($volume) }, qr{no daemon listens}, 'activate');
    ok -e $site->file("$volume.qcow2"), 'the image stays';
    $site->start;
    ok $site->activate($volume), 'after the restart';
    $site->qemu_io($volume, 'write -P 4 0 1M');
    $site->qemu_io($volume, 'flush');
    $site->crash;
    for my $call (
        ['deactivate', sub { $site->deactivate($volume) }],
        ['free',       sub { $site->call_id_first('free_image', $volume) }],
        ['snapshot',   sub { $site->call('volume_snapshot', $volume, 'a') }],
        ['rename',     sub { $site->call('rename_volume', $volume, 101, undef) }],
        ['notes', sub { $site->call('update_volume_attribute', $volume, 'notes', 'weight=5') }],
    ) {
        dies_with($call->[1], qr{no daemon listens}, $call->[0]);
    }
    is_deeply [glob $site->file('*')], [$site->file("$volume.qcow2")], 'nothing has changed';
    $site->start;
    is_deeply $site->served, [$volume], 'the disk is served again';
    ok $site->qemu_io($volume, 'read -P 4 0 1M'), 'with its data';
    ok $site->activate($volume), 'activate again';
    ok $site->deactivate($volume), 'deactivate';

    # Calls that were interrupted between the daemon and its config file.
    my $name = $volume;
    my @add  = ('disk', 'add', $name, $site->file("$name.qcow2"), '-f', 'qcow2');
    my $weir = sub (@command) {
        PVE::Storage::Custom::Weir::Command::weir($site->{scfg}, @command);
    };
    $weir->(@add);
    ok $site->activate($volume), 'a disk that is not saved';
    like $site->read('weir.toml'), qr{\[disk\.$volume\]}, 'is saved';
    $weir->('disk', 'remove', $name);
    ok $site->activate($volume), 'a disk that is saved, but not served';
    is_deeply $site->served, [$volume], 'is served';
    $site->deactivate($volume);

    # Files of interrupted calls.
    $site->write('pool/.vm-100-disk-1.qcow2.new', 'half of an image');
    is $site->alloc, 'vm-100-disk-1', 'a file that an interrupted allocation has left';
    ok !-e $site->file('.vm-100-disk-1.qcow2.new'), 'is replaced';
    link $site->file("$volume.qcow2"), $site->file('base-100-disk-0.qcow2') or die;
    is $site->call_id_first('create_base', $volume), 'base-100-disk-0', 'a rename is completed';
    ok !-e $site->file("$volume.qcow2"), 'the old name is gone';
    $site->activate('base-100-disk-0');
    ok $site->qemu_io('base-100-disk-0', 'read -P 4 0 1M'), 'and the data is there';
    is $site->stop, 0, 'the daemon ends cleanly';
};

done_testing;
