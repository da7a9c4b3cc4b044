//! The kubectl plug-in: `kubectl krypton get clusters`.

use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

use krypton_kubectl::{KubectlError, Printed};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let env = |name: &str| std::env::var(name).ok();
    let (args, now) = (std::env::args_os(), jiff::Timestamp::now());
    // Not locked, because `--watch` would hold the lock until it ends.
    match krypton_kubectl::run(args, &env, now, &mut io::stdout()).await {
        Ok(printed) => print(&printed),
        Err(KubectlError::Usage(error)) => error.exit(),
        Err(error @ KubectlError::NotReady { .. }) => {
            let code = ExitCode::from(error.exit_code() as u8);
            let KubectlError::NotReady { printed } = error else {
                return code;
            };
            match print(&printed) == ExitCode::SUCCESS {
                true => code,
                false => ExitCode::FAILURE,
            }
        }
        Err(error) => {
            if let KubectlError::Incomplete { printed, .. } | KubectlError::Partly { printed, .. } =
                &error
            {
                print(printed);
            }
            eprintln!("error: {}", one_line(&error));
            ExitCode::from(error.exit_code() as u8)
        }
    }
}

fn print(printed: &Printed) -> ExitCode {
    eprint!("{}", printed.stderr);
    match io::stdout().write_all(printed.stdout.as_bytes()) {
        // A reader such as `head` may close the pipe early. Ignore that.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("error: writing the output failed: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Joins the error and its sources on one line, without repeated texts.
fn one_line(error: &dyn Error) -> String {
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
