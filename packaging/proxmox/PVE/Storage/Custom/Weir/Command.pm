# Configuration of a storage, and the commands of weir for it.
#
# The only place that starts a program or connects to a socket: no argument ever reaches a shell,
# and each call has a time limit.
#
# SPDX-License-Identifier: MIT OR Apache-2.0
package PVE::Storage::Custom::Weir::Command;

use v5.36;

use Exporter qw(import);
use IO::Handle;
use IO::Select;
use IO::Socket::UNIX;
use JSON::PP ();

use PVE::Tools qw(run_command);

our @EXPORT_OK =
    qw($PATH $GROUP $NAME pool nbd control weir image_info daemon_status disk_space qmp);

# Seconds for a command that only reads, and for one that changes an image or the daemon.
use constant {
    QUERY_TIMEOUT  => 20,
    CHANGE_TIMEOUT => 600,
};

# Characters of paths that need no quoting in an address of weir or in a URI.
our $PATH = qr{/[A-Za-z0-9_./-]+};

# Names of groups; and names of volumes after `vm-ID-`. A volume has no dot, so other files of a
# pool, such as the overlay vm-1-disk-0.snap-1.qcow2, are none.
our $GROUP = qr{[A-Za-z0-9][A-Za-z0-9_.-]*};
our $NAME  = qr{[A-Za-z0-9][A-Za-z0-9_-]*};

# A path of the configuration. The match removes the taint of values that were read from a file.
sub configured ($scfg, $key, $default = undef) {
    my $value = $scfg->{$key} // $default;
    my ($path) = defined $value ? $value =~ m{\A($PATH)\z} : ();
    die "$key: not set, or not an absolute path of letters, digits and _./- (set it in"
        . " storage.cfg)\n"
        if !defined $path;
    return $path =~ s{(?<=.)/+\z}{}r;
}

sub pool ($scfg)    { return configured($scfg, 'weir-pool') }
sub nbd ($scfg)     { return configured($scfg, 'weir-socket', '/run/weir/nbd.sock') }
sub control ($scfg) { return configured($scfg, 'weir-control', '/run/weir/qmp.sock') }

# Runs `weir ARGUMENTS` and returns its standard output. Dies with the message of the command.
my sub run ($scfg, $timeout, @arguments) {
    # Any byte but NUL is safe in an argument of a program that no shell starts.
    my @safe = map { m{\A([^\0]*)\z}s ? $1 : die "an argument of weir has a NUL\n" } @arguments;
    my (@output, @errors);
    local $ENV{WEIR_QMP} = 'unix:' . control($scfg);
    my $status = run_command(
        ['weir', @safe],
        outfunc => sub ($line) { push @output, $line },
        errfunc => sub ($line) { push @errors, $line },
        timeout => $timeout,
        noerr   => 1,
        quiet   => 1,
    );
    return join "\n", @output if $status == 0;
    my $why = join ' ', grep { m{\S} } @errors;
    die length $why
        ? "$why\n"
        : "weir $safe[0]: exit status $status (is the package weir installed?)\n";
}

# Runs a command that changes an image or the daemon.
sub weir ($scfg, @arguments) { return run($scfg, CHANGE_TIMEOUT, @arguments) }

# Size, format, backing file and snapshots of an image, which the daemon may serve meanwhile.
# The name decides the format, because a guest can write the header of any format to a raw image.
sub image_info ($scfg, $file) {
    my ($format) = $file =~ m{\.(qcow2|raw)\z};
    my @arguments = (qw(image info --json --force-share -f), $format, $file);
    return JSON::PP::decode_json(run($scfg, QUERY_TIMEOUT, @arguments));
}

# The status of the daemon with all its disks; dies if it does not answer.
sub daemon_status ($scfg) {
    return JSON::PP::decode_json(run($scfg, QUERY_TIMEOUT, qw(status --json --interval 0)));
}

# Bytes of the pool's file system: total, available, used.
sub disk_space ($scfg) {
    my $pool = pool($scfg);
    my @lines;
    run_command(
        ['df', '-B1', '--output=size,avail,used', '--', $pool],
        outfunc => sub ($line) { push @lines, $line },
        timeout => QUERY_TIMEOUT,
        quiet   => 1,
    );
    my @space = ($lines[-1] // '') =~ m{\A\s*(\d+)\s+(\d+)\s+(\d+)\s*\z}
        or die "df: unexpected output for $pool\n";
    return map { int } @space;
}

# Executes a command of QMP at the control socket: for those that no command of weir has. Returns
# its result.
sub qmp ($scfg, $execute, %arguments) {
    my $path = control($scfg);
    my $socket = IO::Socket::UNIX->new(Peer => $path)
        or die "$path: $!: no daemon answers there (start weir)\n";
    my $readable = IO::Select->new($socket);
    my $received = '';
    my $reply = sub {
        while (1) {
            while ($received =~ s{\A([^\n]*)\n}{}) {
                my $message = JSON::PP::decode_json($1);
                next if $message->{event};
                die "$execute: $message->{error}{desc}\n" if $message->{error};
                return $message->{return};
            }
            die "$path: $execute: no answer within @{[CHANGE_TIMEOUT]} seconds\n"
                if !$readable->can_read(CHANGE_TIMEOUT);
            sysread $socket, $received, 65536, length $received
                or die "$path: $execute: the daemon closed the connection (see its log)\n";
        }
    };
    my $send = sub (%message) {
        local $SIG{PIPE} = 'IGNORE';
        print {$socket} JSON::PP::encode_json(\%message), "\n" and $socket->flush
            or die "$path: $execute: $!\n";
    };
    $reply->();    # the greeting
    $send->(execute => 'qmp_capabilities');
    $reply->();
    $send->(execute => $execute, arguments => \%arguments);
    return $reply->();
}

1;
