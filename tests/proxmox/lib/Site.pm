# A pool, a config file and a `weir serve` for the tests of the storage plugin.
#
# Waits for events only: the daemon's line `ready`, the end of a process, a client's output.
package Site;

use v5.36;

use File::Temp qw(tempdir);
use IPC::Open2 qw(open2);
use JSON::PP ();

use PVE::Storage::Custom::WeirPlugin;

use constant PLUGIN => 'PVE::Storage::Custom::WeirPlugin';

sub untainted ($text) { return $text =~ m{\A(.*)\z}s ? $1 : undef }

# The tests run with taint checks, as the daemons of Proxmox VE do, which also set their PATH.
sub new ($class) {
    my ($weir) = ($ENV{WEIR} // '') =~ m{\A(/.+)/weir\z} or die "WEIR is not the path of weir\n";
    $ENV{PATH} = "$weir:/usr/bin:/bin:/usr/sbin:/sbin";
    delete @ENV{qw(IFS CDPATH ENV BASH_ENV WEIR_QMP)};
    my $root = untainted(tempdir(CLEANUP => 1));
    mkdir "$root/pool" or die "$root/pool: $!\n";
    my $self = bless { root => $root, storeid => 'fast' }, $class;
    $self->{scfg} = {
        type           => 'weir',
        'weir-pool'    => "$root/pool",
        'weir-socket'  => "$root/nbd.sock",
        'weir-control' => "$root/qmp.sock",
    };
    $self->write('weir.toml', <<~"END");
        [daemon]
        nbd = "unix:$root/nbd.sock"
        qmp = "unix:$root/qmp.sock"
        image-root = "$root/pool"
        state = "$root"

        [group.gold]
        iops-total = 5000

        [disk.none]
        image = "null:1M"
        END
    return $self;
}

# Calls a method of the plugin that has the storage's configuration before its id, or after it.
sub call ($self, $method, @arguments) {
    return PLUGIN->$method($self->{scfg}, $self->{storeid}, @arguments);
}

sub call_id_first ($self, $method, @arguments) {
    return PLUGIN->$method($self->{storeid}, $self->{scfg}, @arguments);
}

sub alloc ($self, $vmid = 100, $name = undef, $kib = 65536) {
    return $self->call_id_first('alloc_image', $vmid, 'raw', $name, $kib);
}

sub activate ($self, $volname, @more) {
    return $self->call_id_first('activate_volume', $volname, @more);
}

sub deactivate ($self, $volname) { return $self->call_id_first('deactivate_volume', $volname) }

sub file ($self, $name) { return "$self->{scfg}{'weir-pool'}/$name" }

sub write ($self, $name, $text) {
    open my $file, '>', "$self->{root}/$name" or die "$name: $!\n";
    print {$file} $text;
    close $file or die "$name: $!\n";
    return;
}

sub read ($self, $name) {
    open my $file, '<', "$self->{root}/$name" or die "$name: $!\n";
    local $/ = undef;
    return scalar <$file>;
}

# Starts the daemon and returns when it is ready.
sub start ($self) {
    pipe my $log, my $write or die "pipe: $!\n";
    my $pid = fork // die "fork: $!\n";
    if (!$pid) {
        open STDERR, '>&', $write or die "dup: $!\n";
        exec 'weir', 'serve', '--config', "$self->{root}/weir.toml" or die "weir: $!\n";
    }
    close $write;
    my @lines;
    while (my $line = <$log>) {
        push @lines, $line;
        # The pipe stays open; it has room for the log of a test.
        if ($line =~ m{ ready }) {
            $self->@{qw(pid log)} = ($pid, $log);
            return $self;
        }
    }
    waitpid $pid, 0;
    die "weir did not start: @lines";
}

sub end ($self, $signal) {
    my $pid = delete $self->{pid} or return;
    kill $signal, $pid;
    waitpid $pid, 0;
    close delete $self->{log};
    return $?;
}

sub stop ($self)  { return $self->end('TERM') }
sub crash ($self) { return $self->end('KILL') }

sub DESTROY ($self) {
    local ($?, $@);
    $self->end('KILL');
    return;
}

# Names of the volumes' disks that the daemon serves.
sub served ($self) {
    my $status = PVE::Storage::Custom::Weir::Command::daemon_status($self->{scfg});
    return [map { $_->{name} } grep { $_->{name} ne 'none' } @{ $status->{disks} }];
}

# One disk of the daemon's status.
sub disk ($self, $name) {
    my $status = PVE::Storage::Custom::Weir::Command::daemon_status($self->{scfg});
    return (grep { $_->{name} eq $name } @{ $status->{disks} })[0];
}

# Runs a command of qemu-io on an active volume; true if it succeeded.
sub qemu_io ($self, $volname, $command) {
    my $path = $self->path($volname);
    my @mode = $command =~ m{\Aread} ? '-r' : ();
    my $pid  = open2(my $output, my $input, 'qemu-io', @mode, '-f', 'raw', '-c', $command, $path);
    close $input;
    my $text = do { local $/ = undef; <$output> };
    waitpid $pid, 0;
    return $? == 0 && $text !~ m{failed|Pattern verification}i;
}

sub path ($self, $volname) {
    return scalar PLUGIN->path($self->{scfg}, $volname, $self->{storeid});
}

# A client that holds a connection until it is closed.
sub client ($self, $volname) {
    my $pid = open2(my $output, my $input, 'qemu-io', '-f', 'raw', $self->path($volname));
    print {$input} "read 0 512\n";
    $input->flush;
    while (my $line = <$output>) {
        return { pid => $pid, input => $input, output => $output } if $line =~ m{read 512/512};
    }
    die "qemu-io has ended\n";
}

sub close_client ($self, $client) {
    close $client->{input};
    waitpid $client->{pid}, 0;
    return;
}

1;
