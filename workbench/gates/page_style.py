"""Style of the gate's page: one column, colours of Okabe and Ito darkened for text, never colour alone."""

STYLE = """
:root { color-scheme: light; --pass: #00664b; --fail: #a63f00; --inconclusive: #6b5200; --shown: #595959; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; color: #222; background: #fff;
  font: 16px/1.5 Helvetica, Arial, sans-serif; overflow-wrap: anywhere; }
p { margin: .25rem 0; } .key span:first-child { margin-left: 0; } .quiet { color: #595959; font-size: .9rem; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: .25rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
header { padding: 1rem; border-left: 8px solid; background: #f4f4f4; }
header.pass { background: #e8f5f0; border-color: var(--pass); }
header.fail { background: #fdf0e8; border-color: var(--fail); }
header.inconclusive { background: #fdf7e3; border-color: var(--inconclusive); }
.verdict { font-size: 1.6rem; font-weight: bold; text-transform: uppercase; letter-spacing: .04em; }
.pass .verdict, h2 .pass, nav .pass { color: var(--pass); } .fail .verdict, h2 .fail, nav .fail { color: var(--fail); }
.inconclusive .verdict, h2 .inconclusive, nav .inconclusive { color: var(--inconclusive); }
.decide { border: 1px solid #ccc; padding: .75rem 1rem; margin: 1rem 0; }
.digest { font-family: monospace; } .digest b { background: #fff3b0; padding: 0 .15rem; }
pre { background: #f4f4f4; padding: .5rem .75rem; margin: .25rem 0; white-space: pre-wrap; font-size: .9rem; }
nav { display: flex; flex-wrap: wrap; gap: .5rem; margin: 1rem 0; }
nav a { border: 1px solid currentColor; border-radius: 1rem; padding: .15rem .75rem; text-decoration: none; }
.key { font-size: .85rem; color: #595959; } .key span { display: inline-block; margin-left: .5rem; }
.key .middle { width: 2px; height: .9rem; background: #888; vertical-align: middle; }
.key .limit { height: .9rem; border-left: 2px dotted #a63f00; vertical-align: middle; }
.key .bar { width: 1.5rem; height: .4rem; background: #888; vertical-align: middle; }
.row { display: grid; grid-template-columns: 19rem 1fr 14rem; gap: 0 1rem; align-items: center; padding: .3rem 0;
  border-bottom: 1px solid #e5e5e5; color: var(--shown); }
.row p:first-child { color: #222; font-size: .95rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.row b { display: block; } .row .quiet { line-height: 1.3; font-size: .85rem; }
.row.missing { display: block; }
.row.pass { color: var(--pass); } .row.fail { color: var(--fail); } .row.inconclusive { color: var(--inconclusive); }
.track { position: relative; height: 1.1rem; margin: .25rem 0;
  background: linear-gradient(90deg, #f1f1f1 74.5%, #fbe6da 74.5%); }
.track i { position: absolute; display: block; font-style: normal; line-height: 1.1rem; }
.track .middle { left: 50%; top: 0; bottom: 0; width: 2px; margin-left: -1px; background: #888; }
.track .limit { left: 74.5%; top: 0; bottom: 0; border-left: 2px dotted #a63f00; margin-left: -1px; }
.track .bar { top: .35rem; height: .4rem; background: currentColor; opacity: .55; }
.track .dot { top: .2rem; width: .7rem; height: .7rem; margin-left: -.35rem; border-radius: 50%;
  background: currentColor; }
.track .left, .track .right { font-size: 1.1rem; } .track .left { left: 0; } .track .right { right: 0; }
article { border: 1px solid #ddd; padding: .5rem .75rem; margin: .75rem 0; }
blockquote { margin: .25rem 0; padding-left: .75rem; border-left: 3px solid #ccc; white-space: pre-wrap;
  font-size: .95rem; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; }
.sides > div { border-top: 3px solid #ccc; } .sides .good { border-color: var(--pass); }
.sides .bad { border-color: var(--fail); }
.sides p { font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .5rem .25rem 0; border-bottom: 1px solid #e5e5e5; }
th { font-weight: normal; } td { font-family: monospace; font-size: .85rem; width: 35%; }
.diff .new { color: var(--pass); } .diff .old { color: var(--fail); }
details { margin: .5rem 0; } summary { cursor: pointer; }
@media (max-width: 48rem) {
  .row { display: block; } .row p:first-child { display: flex; flex-wrap: wrap; justify-content: space-between; }
  .row b { margin-right: 1rem; } .row br { display: none; }
}
@media (max-width: 30rem) { body { padding: .75rem; } .sides { grid-template-columns: 1fr; } td { width: auto; } }
@media print { details > * { display: block; } nav { display: none; } }
"""
