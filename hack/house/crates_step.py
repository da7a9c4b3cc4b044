"""Run once, in an empty checkout, after `move.py hack/house/crates.moves`: writes the manifests of the new crates, splits the
fuzz promises among them, and writes the heads of the libraries. Then `bare.py` and `publish.py`, and the compiler."""

import re
def rd(p): return open(p).read()
def wr(p,s): open(p,'w').write(s)
def manifest(name, deps, dev, features, extra=''):
    f=''.join(f'{l}\n' for l in features)
    def dep(d): return f'{d}\n' if '=' in d else f'{d}.workspace = true\n'
    return f'''[package]
name = "{name}"
version.workspace = true
edition.workspace = true
rust-version.workspace = true
license.workspace = true
publish.workspace = true
{extra}
[lints]
workspace = true
[features]
{f}
[dependencies]
{''.join(dep(d) for d in deps)}
[dev-dependencies]
{''.join(dep(d) for d in dev)}'''
S=lambda t:t.split()
fz=['# The promises that the fuzzer checks. No program needs them.','fuzzing = []']
s=rd('common/types/Cargo.toml').replace('krypton-common','krypton-types')
s=''.join(l for l in s.splitlines(True) if not re.match(r'(tracing|tracing-subscriber)\.workspace',l)); wr('common/types/Cargo.toml',s)
wr('common/runtime/Cargo.toml',manifest('krypton-runtime',S('arc-swap axum clap')+['console-subscriber = { workspace = true, optional = true }']+S('futures http hyper jiff k8s-openapi krypton-crds krypton-types kube opentelemetry opentelemetry-otlp opentelemetry_sdk prometheus-client rand rustix rustls rustls-pki-types serde serde_json tempfile thiserror tokio tokio-util')+['# A collector\'s certificate is checked with the system\'s authorities.','tonic = { workspace = true, features = ["tls-native-roots"] }']+S('tower tracing tracing-opentelemetry tracing-subscriber'),
 ['proptest.workspace = true','tokio = { workspace = true, features = ["test-util"] }'],
 fz+['# A test can kill the program, or have an effect fail, at each of its external effects.','failpoints = []','# For tokio-console, which needs RUSTFLAGS="--cfg tokio_unstable" as well; see `make console`.','console = ["dep:console-subscriber", "tokio/tracing"]']))
wr('common/helm/Cargo.toml',manifest('krypton-helm',S('base64 flate2 futures http jiff k8s-openapi krypton-runtime krypton-types prometheus-client rand reqwest rustix rustls semver serde serde-saphyr')+['serde_json = { workspace = true, features = ["raw_value"] }']+S('sha2 tar tempfile thiserror tokio tokio-util tracing zeroize'),
 S('axum proptest rcgen tokio-rustls')+['tokio = { workspace = true, features = ["test-util"] }'], fz+['failpoints = ["krypton-runtime/failpoints"]']))
wr('common/reconciler/Cargo.toml',manifest('krypton-reconciler',S('flate2 futures http jiff k8s-openapi krypton-crds krypton-helm krypton-runtime krypton-types kube prometheus-client rand rustls serde')+['serde_json = { workspace = true, features = ["raw_value"] }']+S('sha2 tar tempfile thiserror tokio tokio-util tower tracing'),
 S('proptest')+['tokio = { workspace = true, features = ["test-util"] }'], fz+['failpoints = ["krypton-helm/failpoints"]']))
s=rd('agent/Cargo.toml')
i=s.index('[dependencies]')
s=s[:i].replace('failpoints = []','failpoints = ["krypton-reconciler/failpoints"]').replace('console = ["dep:console-subscriber", "tokio/tracing"]','console = ["krypton-runtime/console"]')
s=re.sub(r'# The promises that the fuzzer checks.*\nfuzzing = \[\]\n','',s)
s+='[dependencies]\n'+''.join(f'{d}.workspace = true\n' for d in S('anyhow arc-swap axum base64 clap futures http hyper-util jiff k8s-openapi krypton-helm krypton-proto krypton-reconciler krypton-runtime krypton-types kube prometheus-client rand rcgen rustls serde serde_json tempfile thiserror tokio tokio-rustls tokio-stream tokio-util tonic tower tracing x509-parser zeroize'))
s+='\n[dev-dependencies]\nproptest.workspace = true\ntokio = { workspace = true, features = ["test-util"] }\n'
wr('agent/Cargo.toml',s)
s=rd('hub/Cargo.toml').replace('krypton-common.workspace = true','krypton-helm.workspace = true\nkrypton-reconciler.workspace = true\nkrypton-runtime.workspace = true\nkrypton-types.workspace = true').replace('failpoints = ["krypton-agent/failpoints"]','failpoints = ["krypton-reconciler/failpoints"]').replace('console = ["krypton-agent/console"]','console = ["krypton-runtime/console"]')
s=s.replace('krypton-agent.workspace = true\n','',1).replace('[dev-dependencies]\n','[dev-dependencies]\n# The other end of the wire.\nkrypton-agent.workspace = true\n')
wr('hub/Cargo.toml',s)
s=rd('proto/Cargo.toml').replace('krypton-common','krypton-types'); wr('proto/Cargo.toml',s)
s=rd('tests/Cargo.toml').replace('krypton-common.workspace = true','krypton-helm.workspace = true\nkrypton-reconciler.workspace = true\nkrypton-runtime.workspace = true\nkrypton-types.workspace = true').replace('failpoints = ["krypton-hub/failpoints"]','failpoints = ["krypton-agent/failpoints", "krypton-hub/failpoints"]')
wr('tests/Cargo.toml',s)
s=rd('Cargo.toml').replace('members = ["common", "crds", "proto", "agent", "hub", "tests"]','members = ["common/*", "crds", "proto", "agent", "hub", "tests"]').replace('krypton-common = { path = "common" }','krypton-helm = { path = "common/helm" }\nkrypton-reconciler = { path = "common/reconciler" }\nkrypton-runtime = { path = "common/runtime" }\nkrypton-types = { path = "common/types" }')
wr('Cargo.toml',s)
s=rd('fuzz/Cargo.toml').replace('krypton-agent = { path = "../agent", features = ["fuzzing"] }\nkrypton-common = { path = "../common", features = ["fuzzing"] }\n','krypton-helm = { path = "../common/helm", features = ["fuzzing"] }\nkrypton-reconciler = { path = "../common/reconciler", features = ["fuzzing"] }\nkrypton-runtime = { path = "../common/runtime", features = ["fuzzing"] }\nkrypton-types = { path = "../common/types", features = ["fuzzing"] }\n')
wr('fuzz/Cargo.toml',s)

import re,os
def rd(p): return open(p).read()
def wr(p,s): open(p,'w').write(s)
s=rd('agent/src/fuzzing.rs')
fns={}
for m in re.finditer(r'(?:^///[^\n]*\n)*^(?:pub )?fn (\w+)\(.*?^\}\n',s,re.M|re.S):
    fns[m.group(1)]=m.group(0)
print(fns.keys())
groups={'helm':['chart','small','index','manifest','tags','token','challenge','link','range','release','complaint'],'runtime':['durations'],'reconciler':['pointer','record']}
uses_by={'helm':'''use std::io::Read as _;
use std::sync::Arc;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_types::error_chain::chain;
use krypton_types::redact::HIDDEN;
use reqwest::Url;
use serde_json::{Map, Value};
use crate::chart::index::find;
use crate::chart::oci::challenge::{self, Challenge};
use crate::chart::range::Range;
use crate::chart::version::{self, Asked, Wanted};
use crate::chart::{CHART_LIMIT, ChartRef, archive_promises, oci, provenance};
use crate::driver::stderr::{self as complaint, Complaint, SHORTEST_SECRET, WAY_OUT};
use crate::releases::{self, Status};
''','runtime':'''use std::time::Duration;
use crate::args::go_values::parse_duration;
''','reconciler':'''use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use serde_json::Value;
use crate::drift::difference::differences;
use crate::drift::ignore::{self, keep};
use crate::drift::json_pointer::{Step, escaped, steps};
use crate::record::{self as desired_record, Advance};
use crate::release_record::{self, ReleaseRecord, Verdict};
'''}
tail='''
#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn each_seed_keeps_its_promises() {
        shared::replay(TARGETS);
    }
}
'''
for g,names in groups.items():
    targets=sorted(n for n in names if n!='small')
    t="//! Promises about every input. The fuzzer checks them on the inputs that it finds, and a test on the seeds.\n\n"+uses_by[g]+'''
#[path = "../../../fuzz/shared.rs"]
mod shared;
use shared::{Target, promise'''+(', unfit' if g!='runtime' else '')+'''};
/// By the names of the folders of seeds.
pub const TARGETS: &[(&str, Target)] = &[
'''+''.join(f'    ("{n}", {n}),\n' for n in targets)+'];\n\n'+'\n'.join(fns[n] for n in names)+tail
    if g=='helm': t=re.sub(r'(?<![\w:"])release::','releases::',t)
    if g=='reconciler': t=re.sub(r'(?<![\w:])ledger::','desired_record::',t)
    wr(f'common/{g}/src/fuzzing.rs',t)
    for n in targets:
        p=f'fuzz/fuzz_targets/{n}.rs'; x=rd(p); x=x.replace('krypton_agent::fuzzing',f'krypton_{g}::fuzzing'); wr(p,x)
os.remove('agent/src/fuzzing.rs')
for p,a,b in [
 ('fuzz/shared.rs','    format!("{}/../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"))','    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();\n    let mut folders = crates.map(|folder| folder.join("fuzz/corpus"));\n    let corpus = folders.find(|folder| folder.exists()).unwrap();\n    corpus.join(target).to_str().unwrap().to_owned()'),
 ('common/types/src/fuzzing.rs','.join("..");','.join("../..");'),
 ('common/types/src/fuzzing.rs','#[path = "../../fuzz/shared.rs"]','#[path = "../../../fuzz/shared.rs"]'),
 ('common/types/src/fuzzing.rs','            let module = read(&format!("{of}/src/fuzzing.rs"));','            let (crate_name, _) = of.split_once("::").unwrap();\n            let folder = ["", "common/"].map(|above| format!("{above}{crate_name}/src/fuzzing.rs"));\n            let folder = folder.iter().find(|path| root.join(path).exists());\n            let module = read(folder.expect(&name));'),
 ('common/types/src/kubeconfig/property_tests.rs','"/../fuzz','"/../../fuzz'),
 ('common/helm/src/chart/archive.rs','"/../fuzz','"/../../fuzz'),
 ('common/helm/src/chart/range.rs','../../../hack/semver','../../../../hack/semver'),
 ('common/helm/src/chart/range.rs','../../../hack/tools','../../../../hack/tools'),
 ('common/reconciler/src/plan/repair.rs','"../docs','"../../docs'),
 ('common/helm/tests/driver.rs','"helm_driver/stage.rs"','"driver/stage.rs"'),
]:
    x=rd(p); assert a in x,(p,a); wr(p,x.replace(a,b))

import re
def rd(p): return open(p).read()
def wr(p,s): open(p,'w').write(s)
docs={
'types':'''//! The words of the domain, as plain values: names, keys, the desired state, reports, conditions, identities, and the
//! documents that hub, agent and kubectl exchange.
//!
//! It knows no clock, file, process or Kubernetes client, and imports no other crate of Krypton.
''',
'runtime':'''//! What a process needs to run and to talk to an API server: clients, Leases, watches, retries, logs, traces, metrics
//! ports, failpoints.
//!
//! It knows no Tenant and no chart, and imports `krypton-types` alone; of `krypton-crds` it uses the version of a schema.
''',
'helm':'''//! Runs Helm, fetches and checks charts, and reads the Secrets that Helm keeps of a release.
//!
//! It knows no Tenant, no Lease and no desired state, and not who calls it. It imports `krypton-runtime` and
//! `krypton-types`.
''',
'reconciler':'''//! Keeps one member cluster as its desired state says, for the agent on the member and for the hub in an agent's place.
//!
//! It knows neither hub nor agent nor the protocol between them, and not where it runs. It imports `krypton-helm` and
//! the crates below it.
''',
}
for c,d in docs.items():
    p=f'common/{c}/src/lib.rs'; s=rd(p); s=re.sub(r'^//![^\n]*\n','',s).lstrip('\n')
    if c=='runtime': s=s.replace('pub mod admin;\n','pub mod admin;\npub mod args;\n')
    if c in('helm','runtime','reconciler'):
        f='#[cfg(any(test, feature = "fuzzing"))]\npub mod fuzzing;\n'
        k={'helm':'pub mod metrics;','runtime':'pub mod lease;','reconciler':'mod helm_queue;'}[c]
        s=s.replace(k,f+k)
    wr(p,d+'\n'+s)
s=rd('agent/src/lib.rs')
mods=re.sub(r'^//![^\n]*\n','',s,flags=re.M).strip('\n')
mods=mods.replace('#[cfg(any(test, feature = "fuzzing"))]\npub mod fuzzing;\n','')
wr('agent/src/lib.rs','''//! The agent of one member: its process, who it is, and its session with the hub.
//!
//! What reconciles the member is `krypton-reconciler`, which the agent starts and whose reports it sends. It knows nothing
//! of the home cluster, of the hub's objects, or of how a plan is made.
//!
//! Modules depend one way: `app` → `credentials`, `session`.
pub mod app;
pub mod args;
pub mod credentials;
pub mod dump;
#[cfg(test)]
pub(crate) mod fake_hub;
pub mod metrics;
pub mod session;
''')
print(mods)
wr('agent/src/credentials.rs','//! Who this agent is, and whom it trusts.\n\n'+rd('agent/src/credentials.rs'))
