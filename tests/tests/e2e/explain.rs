//! Shows that `kubectl krypton explain` reports the cause, the next step with its time, silent members, and a member's
//! Tenants.

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use krypton_kubectl::ExitCode;
use krypton_tests::{
    Merge as _, Mode, Pair, Scenario, TestResult, assert_contains, by_agent, eventually,
    fleet::{FleetClient, HUB_NAMESPACE},
    membership::run_kubectl_krypton,
};
use serde_json::json;

const ACME: [&str; 4] = ["tenant", "acme", "-n", "default"];

by_agent!(explain_names_cause_retry_and_silent_reporter);

async fn explain_names_cause_retry_and_silent_reporter(mode: Mode) -> TestResult {
    let (mut pair, chart) = Scenario::new("explain", mode).start().await?;
    let before = Timestamp::now();
    chart.write("replicaCount: 0\nfailWith: because it must")?;
    // The Tenant on the home cluster shows the state of its namesake on the member.
    for fleet_client in [FleetClient::new(pair.home()), pair.fleet_client()] {
        fleet_client.create("acme", json!({})).await?;
    }
    let retried = "next: it is retried at ";
    let failed = wait_for_explanation(&pair, &ACME, ExitCode::NotReady, retried).await?;
    assert_contains!(failed, "✗ InstallFailed: ", "because it must");
    let retry_time = failed.split("retried at ").nth(1).unwrap();
    let (retry_time, rest) = retry_time.split_once(' ').unwrap();
    assert!(rest.starts_with("(in "), "{failed}");
    assert!(retry_time.parse::<Timestamp>()? > before, "{failed}");

    chart.write("replicaCount: 0")?;
    let healthy = wait_for_explanation(&pair, &ACME, ExitCode::Success, "✓ Installed: ").await?;
    assert!(!healthy.contains("next: "), "{healthy}");
    assert_contains!(healthy, "✓ it has applied the current desired state ");

    let member = ["cluster", pair.name()];
    let counted = "✓ 1 of 1 Tenants are Ready";
    wait_for_explanation(&pair, &member, ExitCode::Success, counted).await?;
    check_explanation_from_report(&mut pair).await?;

    pair.actor()?.kill9().await?;
    let silent = "no contact since 20";
    wait_for_explanation(&pair, &ACME, ExitCode::NotReady, silent).await?;
    let member = ["cluster", pair.name()];
    wait_for_explanation(&pair, &member, ExitCode::NotReady, silent).await?;
    Ok(())
}

/// A Tenant that only the member has is listed and explained from the member's report.
async fn check_explanation_from_report(pair: &mut Pair) -> TestResult {
    pair.fleet_client().create("local", json!({})).await?;
    let debug_address = format!("--debug-address={}", pair.hub()?.debug_address());
    let explain = ["explain", "tenant", "local", "-n", "default"];
    let hub = [
        "--hub-namespace",
        HUB_NAMESPACE,
        "--on",
        pair.name(),
        &debug_address,
    ];
    let explain = [explain.as_slice(), &hub].concat();
    let only = format!("✓ Tenant default/local exists only on {}", pair.name());
    eventually("the explanation of the member's Tenant", async || {
        let result = run_kubectl_krypton(pair.home(), &explain).await?;
        let output = format!("{}{}", result.stdout, result.stderr);
        let expected = output.contains(&only) && output.contains("✓ Installed: ");
        match result.status.success() && expected {
            true => Ok(Some(())),
            false => bail!("{output}"),
        }
    })
    .await?;
    let fleet = ["get", "tenants", "--fleet", "-n", "default", "--not-ready"];
    let result =
        run_kubectl_krypton(pair.home(), &[&fleet[..5], &[&debug_address]].concat()).await?;
    for name in ["acme", "local"] {
        let row = format!("{}   default     {name}", pair.name());
        assert!(result.stdout.contains(&row), "{result:?}");
    }
    let result =
        run_kubectl_krypton(pair.home(), &[&fleet[..], &[&debug_address]].concat()).await?;
    assert_eq!(result.stderr, "No Tenants found\n", "{result:?}");
    // New labels on the member reach the hub without another change of the Tenant.
    let tenants = pair.fleet_client().tenants();
    let labels = json!({"metadata": {"labels": {"team": "a"}}});
    tenants.merge("local", &labels).await?;
    let selector = ["-l", "team in (a, b)", "-o", "name", &debug_address];
    let selected = [&fleet[..5], &selector].concat();
    let expected = format!("{}/default/local\n", pair.name());
    eventually("the labelled Tenant in the list of the fleet", async || {
        let result = run_kubectl_krypton(pair.home(), &selected).await?;
        match result.stdout == expected {
            true => Ok(Some(())),
            false => bail!("{result:?}"),
        }
    })
    .await?;
    Ok(())
}

/// Waits until the output contains this text and the command exits with this code. Returns the output.
async fn wait_for_explanation(
    pair: &Pair,
    object: &[&str],
    code: ExitCode,
    text: &str,
) -> Result<String> {
    let command = ["explain", "--hub-namespace", HUB_NAMESPACE];
    let args = [command.as_slice(), object].concat();
    eventually(text, async || {
        let output = run_kubectl_krypton(pair.home(), &args).await?;
        let exit_code = output.status.code().context("it was killed")?;
        match exit_code == code as i32 && output.stdout.contains(text) {
            true => Ok(Some(output.stdout)),
            false => bail!("{exit_code}: {}{}", output.stdout, output.stderr),
        }
    })
    .await
}
