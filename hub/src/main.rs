//! krypton-hub: keeps one Helm chart installed for every Tenant on every cluster of a fleet.

use std::process::ExitCode;
use std::time::Duration;

use krypton_hub::app::{Outside, run_in};
use krypton_hub::args::{Settings, service_account_namespace};
use krypton_types::error_chain::chain;

/// Time for the last tasks to end, before the process exits.
const LAST_TASKS: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    // The supervisor process of one Helm run; see `krypton_helm::driver`.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|first| first == "helm-run")
    {
        return krypton_helm::driver::supervise(std::env::args_os().skip(2));
    }
    let env = |name: &str| std::env::var(name).ok();
    let settings = Settings::read(std::env::args_os(), &env, service_account_namespace());
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => error.exit(),
    };
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        return fail("another TLS provider was installed before ours", 1);
    }
    let (log, _traces) = match settings.telemetry().start() {
        Ok(telemetry) => telemetry,
        Err(error) => return fail(&chain(&error), 2),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("starting the runtime failed: {error}"), 1),
    };
    let hub = async { run_in(settings, Outside::real(log)?).await };
    let result = runtime.block_on(hub);
    // A read of a file may hang with its mount, and is not waited for.
    runtime.shutdown_timeout(LAST_TASKS);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{error:#}"), 1),
    }
}

fn fail(problem: &str, code: u8) -> ExitCode {
    eprintln!("krypton-hub: {problem}");
    ExitCode::from(code)
}
