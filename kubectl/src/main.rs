//! The kubectl plug-in: `kubectl krypton get clusters`.

use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

use krypton_kubectl::{CommandOutput, KubectlError};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let env = |name: &str| std::env::var(name).ok();
    let (args, now) = (std::env::args_os(), jiff::Timestamp::now());
    // Not locked, because `--watch` would hold the lock until it ends.
    match krypton_kubectl::run(args, &env, now, &mut io::stdout()).await {
        Ok(output) => print(&output, ExitCode::SUCCESS),
        Err(KubectlError::Usage(error)) => error.exit(),
        Err(error) => {
            let code = ExitCode::from(error.exit_code() as u8);
            match &error {
                KubectlError::NotReady { output } => return print(output, code),
                KubectlError::Partial { output, .. } => {
                    print(output, code);
                }
                _ => {}
            }
            eprintln!("error: {}", error_line(&error));
            code
        }
    }
}

/// Prints the output of a command. Returns `code`, or a failure if the output cannot be written.
fn print(output: &CommandOutput, code: ExitCode) -> ExitCode {
    eprint!("{}", output.stderr);
    match io::stdout().write_all(output.stdout.as_bytes()) {
        // A reader such as `head` may close the pipe early. Ignore that.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("error: writing the output failed: {error}");
            ExitCode::FAILURE
        }
        _ => code,
    }
}

/// Joins the error and its sources on one line, without repeated texts.
fn error_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let text = source.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        next = source.source();
    }
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}
