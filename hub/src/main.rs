//! krypton-hub: keeps one Helm chart installed for every Tenant on every cluster of a fleet.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use krypton_hub::args::{Flags, Settings, service_account_namespace};
use krypton_types::error_chain::chain;

/// Time for the last tasks to end, before the process exits.
const LAST_TASKS: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let program = args.next();
    let mut args: Vec<OsString> = args.collect();
    // The small process that watches over one helm run; see `krypton_helm::driver`.
    if args.first().is_some_and(|first| first == "helm-run") {
        return krypton_helm::driver::supervise(args.drain(1..));
    }
    let flags = match Flags::read(program.into_iter().chain(args)) {
        Ok(flags) => flags,
        Err(error) => error.exit(),
    };
    let env = |name: &str| std::env::var(name).ok();
    let settings = match Settings::resolve(flags, &env, service_account_namespace()) {
        Ok(settings) => settings,
        Err(error) => return refuse(&chain(&error), 2),
    };
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        return refuse("another TLS provider was installed before ours", 1);
    }
    let (log, _traces) = match settings.telling().start() {
        Ok(started) => started,
        Err(error) => return refuse(&chain(&error), 2),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return refuse(&format!("starting the runtime failed: {error}"), 1),
    };
    let ended = runtime.block_on(krypton_hub::app::run(settings, log));
    // A read of a file may hang with its mount, and is not waited for.
    runtime.shutdown_timeout(LAST_TASKS);
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&format!("{error:#}"), 1),
    }
}

fn refuse(problem: &str, code: u8) -> ExitCode {
    eprintln!("krypton-hub: {problem}");
    ExitCode::from(code)
}
