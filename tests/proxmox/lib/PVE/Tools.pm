# Stand-in for PVE::Tools of Proxmox VE: `run_command` with the options that the plugin uses.
#
# Stricter than the original, to find mistakes of the plugin: a command must be a list, and an
# unknown option is an error.
package PVE::Tools;

use v5.36;

use Exporter qw(import);
use IO::Select;
use IPC::Open3 qw(open3);
use Symbol qw(gensym);

our @EXPORT_OK = qw(run_command);

my %OPTIONS = map { $_ => 1 } qw(outfunc errfunc timeout noerr quiet);

# Runs a program without a shell and passes each line of its output to a function. Returns its exit
# status; dies if it is not 0, without `noerr`.
sub run_command ($command, %options) {
    die "run_command: a command that is not a list would start a shell\n"
        if ref $command ne 'ARRAY' || @$command < 2 || grep { ref || !defined } @$command;
    my @unknown = grep { !$OPTIONS{$_} } keys %options;
    die "run_command: unknown options @unknown\n" if @unknown;
    die "run_command: @$command: without a timeout\n" if !$options{timeout};

    my $errors = gensym;
    my $pid    = open3(my $input, my $output, $errors, @$command);
    close $input;
    my %functions = (fileno $output => $options{outfunc}, fileno $errors => $options{errfunc});
    my %rest      = map { $_ => '' } keys %functions;
    my $streams   = IO::Select->new($output, $errors);
    local $SIG{ALRM} = sub { kill 'KILL', $pid; die "command '@$command' failed: got timeout\n" };
    alarm $options{timeout};
    while ($streams->count) {
        for my $stream ($streams->can_read) {
            my $number = fileno $stream;
            my $count  = sysread $stream, $rest{$number}, 65536, length $rest{$number};
            while ($rest{$number} =~ s{\A([^\n]*)\n}{}) {
                $functions{$number}->($1) if $functions{$number};
            }
            $streams->remove($stream) if !$count;
        }
    }
    waitpid $pid, 0;
    alarm 0;
    my $status = $? >> 8 || $? & 127;
    die "command '@$command' failed: exit code $status\n" if $status && !$options{noerr};
    return $status;
}

1;
